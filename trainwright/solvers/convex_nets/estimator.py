"""The programme in scikit-learn's dialect: `ReLURegressor` (½ sum of squares) and `ReLUClassifier` (logistic, two classes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from ...artifacts import Estimator, UserError
from ..outcome import Status
from .inputs import as_classes, as_examples, as_numbers, like, same_labels
from .network import TwoLayerReLU
from .patterns import sample_patterns
from .programme import AdmmOptions, ReLUProgrammeResult, solve_relu_programme


class _ReLUNet(Estimator):
    """What both estimators share: settings, the programme's run, and the fitted network's attributes."""

    network_: TwoLayerReLU
    objective_: float
    convex_objective_: float
    n_iter_: int
    n_features_in_: int
    num_patterns_: int
    primal_residual_: float
    dual_residual_: float
    status_: Status
    message_: str
    history_: dict[str, list[float]]
    _loss = "squared"
    _estimator_type = "regressor"

    def __init__(
        self, beta: float = 1e-3, *, num_patterns: int = 100, rho: float = 0.1, step: float = 1.0,
        max_iterations: int = 2000, rtol: float = 1e-5, atol: float = 0.0, max_evaluations: int | None = None,
        max_seconds: float | None = None, fit_intercept: bool = True, seed: int = 0, keep_history: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        AdmmOptions(rho, step)  # raises where they are out of range
        self.beta, self.num_patterns, self.rho, self.step, self.seed = beta, num_patterns, rho, step, seed
        self.max_iterations, self.rtol, self.atol = max_iterations, rtol, atol
        self.max_evaluations, self.max_seconds = max_evaluations, max_seconds
        self.fit_intercept, self.keep_history, self.progress = fit_intercept, keep_history, progress

    def _solve(self, X: Any, y: Tensor, patterns: Tensor | None) -> Self:
        examples = as_examples(X, self.fit_intercept)
        if patterns is None:
            patterns = sample_patterns(examples, self.num_patterns, self.seed)
        found = solve_relu_programme(
            examples, y.to(examples), torch.as_tensor(patterns, device=examples.device), self.beta, loss=self._loss,
            options=AdmmOptions(self.rho, self.step), max_iterations=self.max_iterations, rtol=self.rtol, atol=self.atol,
            max_evaluations=self.max_evaluations, max_seconds=self.max_seconds, seed=self.seed,
            keep_history=self.keep_history, progress=self.progress,
        )  # fmt: skip
        self._take(found, examples.shape[1] - int(self.fit_intercept), patterns.shape[1])
        return self

    def _take(self, found: ReLUProgrammeResult, num_features: int, num_patterns: int) -> None:
        self.network_, self.objective_, self.convex_objective_ = found.x, found.fun, found.convex_fun
        self.n_iter_, self.n_features_in_, self.num_patterns_ = found.nit, num_features, num_patterns
        self.primal_residual_, self.dual_residual_ = found.primal_residual, found.dual_residual
        self.status_, self.message_, self.history_ = found.status, found.message, dict(found.history)

    def _outputs(self, X: Any) -> Tensor:
        if not hasattr(self, "network_"):
            raise UserError("a fitted estimator is needed; got one that is not; call fit(X, y) first")
        examples = as_examples(X, self.fit_intercept)
        if examples.shape[1] - int(self.fit_intercept) != self.n_features_in_:
            found = examples.shape[1] - int(self.fit_intercept)
            raise UserError(f"X with {self.n_features_in_} features is needed; got {found}; give what fit was given")
        return self.network_(examples)


class ReLURegressor(_ReLUNet):
    r"""Fit a two-layer ReLU network by the convex programme over sampled patterns: ½‖f(X) - y‖² + (β/2) ‖weights‖².

    beta: weight decay, against a loss that is summed. num_patterns: drawn, then each kept once. rho, step: ADMM's ρ > 0 and
    γ in (0, 1]; ρ goes with the size of the loss. fit_intercept: a column of ones is added, its weights decayed too.

    `fit(X, y)`, X (n, d) and y (n), tensors or arrays (computed in float64), sets `network_`, `objective_` (the network's
    own), `convex_objective_`, `n_iter_`, `primal_residual_`, `dual_residual_`, `num_patterns_`, `status_` and
    `message_` (not converged: the last word is the remedy); `fit(X, y, patterns)` takes patterns of [X, 1] of your own.

    Not for many features when the training objective itself counts: the sampled programme is not the global optimum, and
    Adam on enough units often reaches less. See `solve_relu_programme` for errors, cost and source.

    >>> X = torch.linspace(-1, 1, 21, dtype=torch.float64)[:, None]
    >>> net = ReLURegressor(1e-3).fit(X, X.abs().flatten())
    >>> bool((net.predict(X) - X.abs().flatten()).abs().max() < 0.02)
    True
    """

    def fit(self, X: Any, y: Any, patterns: Tensor | None = None) -> Self:
        """Fit to y (n)."""
        return self._solve(X, as_numbers(y), patterns)

    def predict(self, X: Any) -> Any:
        """Return the outputs (n)."""
        return like(X, self._outputs(X))

    def score(self, X: Any, y: Any) -> float:
        """Return R² on (X, y), as regressors of scikit-learn do: 1 for exact outputs, 0 for the mean of y."""
        wanted = as_numbers(y)
        left = (wanted - self._outputs(X).cpu()).square().sum()
        return float(1 - left / (wanted - wanted.mean()).square().sum())


class ReLUClassifier(_ReLUNet):
    r"""As `ReLURegressor` for two classes, with Σ log(1 + exp(-y f(x))); ADMM's first step is Newton's method in the n outputs.

    `classes_` are the labels in order; `decision_function` is f, `predict_proba` (n, 2), `predict` the label.
    A single class or more than two raise `UserError`. An iteration solves some systems of n rows, where the regressor's
    has one factored before: for thousands of examples, try the regressor on labels of ±1 first.

    >>> X = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> net = ReLUClassifier(1e-2, num_patterns=20, max_iterations=60).fit(X, (X.abs() > 0.5).flatten())
    >>> net.predict(X).eq((X.abs() > 0.5).flatten()).all().item()
    True
    """

    classes_: Any
    _loss = "logistic"
    _estimator_type = "classifier"

    def fit(self, X: Any, y: Any, patterns: Tensor | None = None) -> Self:
        """Fit to labels y (n) of two classes."""
        self.classes_, signs = as_classes(y)
        return self._solve(X, signs, patterns)

    def decision_function(self, X: Any) -> Any:
        """Return the outputs (n); positive: the second class."""
        return like(X, self._outputs(X))

    def predict_proba(self, X: Any) -> Any:
        """Return the classes' probabilities (n, 2)."""
        second = torch.sigmoid(self._outputs(X))
        return like(X, torch.stack([1 - second, second], 1))

    def predict(self, X: Any) -> Any:
        """Return the likelier label of each example."""
        return self.classes_[like(X, (self._outputs(X) > 0).long())]

    def score(self, X: Any, y: Any) -> float:
        """Return the share of labels that are right."""
        return same_labels(self.predict(X), y)
