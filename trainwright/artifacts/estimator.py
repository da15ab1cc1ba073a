"""`Estimator`: scikit-learn's protocol for settings, without scikit-learn, so that `clone`, `Pipeline` and grid searches work."""

from __future__ import annotations

import inspect
from typing import Any, Self

from .record import UserError


class Estimator:
    """A class whose settings are its constructor's parameters, kept under their names.

    `clone`, `Pipeline`, `GridSearchCV` and `cross_val_score` of scikit-learn then take it as one of its own. Subclasses set
    `_estimator_type` to `regressor` or `classifier` where they are one, and check their settings in the constructor.

    >>> class Ridge(Estimator):
    ...     def __init__(self, alpha=1.0):
    ...         self.alpha = alpha
    >>> Ridge(2.0), Ridge().set_params(alpha=3.0).get_params()
    (Ridge(alpha=2.0), {'alpha': 3.0})

    Source: scikit-learn's developer guide, "Developing scikit-learn estimators".
    """

    _estimator_type: str | None = None

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings by name; `deep` is there for scikit-learn: no setting is an estimator itself."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **settings: Any) -> Self:
        """Change settings; `UserError` for one that there is not, and what the constructor raises for values out of range."""
        unknown = [name for name in settings if name not in self._names()]
        if unknown:
            raise UserError(
                f"a setting of {type(self).__name__} is needed; got {unknown[0]!r}; it has {', '.join(self._names())}"
            )
        checked = type(self)(**{**self.get_params(), **settings})
        for name in settings:
            setattr(self, name, getattr(checked, name))
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        changed = [f"{name}={value!r}" for name, value in self.get_params().items() if value != defaults[name].default]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn wants to know of an estimator; only it calls this."""
        from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

        kind = self._estimator_type
        return Tags(
            estimator_type=kind,
            target_tags=TargetTags(required=kind is not None),
            classifier_tags=ClassifierTags(multi_class=False) if kind == "classifier" else None,
            regressor_tags=RegressorTags() if kind == "regressor" else None,
            input_tags=InputTags(),
        )
