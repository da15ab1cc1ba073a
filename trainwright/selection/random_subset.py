"""A random subset: what every way to choose is to be held against."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..artifacts import Estimator, UserError, check_range
from .inputs import as_features, as_labels, drawn_from, is_whole, like
from .sizes import class_sizes


class RandomSubset(Estimator):
    r"""Choose at random, without replacement; each chosen example of a class of n_c, k_c of them chosen, weighs n_c / k_c.

    The weighted gradient sum then equals that of all examples on average, whatever the model: the baseline of `CRAIG`, at no
    cost, and with its settings: `fraction` of each class, or a `budget` of examples in all, shared among the classes
    in proportion (`per_class="proportional"`) or equally; `normalise` for weights that sum to the number chosen.

    `fit(X, y)` looks at X [n, …] for its length alone; without labels y all examples are one class. It sets `indices_` [k]
    (class by class) and `weights_` [k]. Raises `UserError` for settings out of range and labels that do not match.

    >>> chosen = RandomSubset(0.5).fit(torch.zeros(6, 1), torch.tensor([0, 0, 0, 0, 1, 1]))
    >>> chosen.weights_.tolist(), sorted((chosen.indices_ >= 4).tolist())
    ([2.0, 2.0, 2.0], [False, False, True])
    """

    indices_: Any
    weights_: Any

    def __init__(
        self, fraction: float = 0.1, *, budget: int | None = None, per_class: str = "proportional",
        normalise: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        check_range(
            "RandomSubset",
            fraction=(fraction, "in (0, 1]", lambda value: 0.0 < value <= 1.0),
            budget=(budget, "whole, of at least 1", lambda value: value is None or (is_whole(value) and value >= 1)),
            seed=(seed, "whole", is_whole),
            per_class=(per_class, "proportional or equal", lambda value: value in ("proportional", "equal")),
        )
        self.fraction, self.budget, self.per_class = fraction, budget, per_class
        self.normalise, self.seed = normalise, seed

    def fit(self, X: Any, y: Any = None) -> Self:
        """Draw among the rows of X [n, …], class by class where labels y [n] are given."""
        if not hasattr(X, "__len__"):
            raise UserError(f"examples with a length are needed; got {type(X).__name__}; give their features")
        rows = as_features(torch.zeros(len(X), 1))
        classes = [torch.arange(len(rows))] if y is None else as_labels(y, rows)
        generator = drawn_from(self.seed)
        indices: list[Tensor] = []
        weights: list[Tensor] = []
        for places, size in zip(
            classes, class_sizes([len(c) for c in classes], self.fraction, self.budget, self.per_class)
        ):
            indices.append(places[torch.randperm(len(places), generator=generator)[:size]])
            weights.append(torch.full((size,), len(places) / size))
        found = torch.cat(weights)
        if self.normalise:
            found = found * (len(found) / found.sum())
        self.indices_, self.weights_ = like(X, torch.cat(indices)), like(X, found)
        return self
