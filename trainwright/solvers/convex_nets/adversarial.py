r"""The convex programme of a network that is robust in a ball, for a conic solver (cvxpy).

    minimise  mean (1 - y_k f(x_k) + ε ‖Σ_i d_ki (v_i - w_i)‖₁)₊ + β Σ_i (‖v_i‖ + ‖w_i‖)     `_programme`
    so that   (2 D_i - I) X v_i ≥ ε ‖v_i‖₁ for every example, and of w_i                       `_keeps_patterns`

The constraints keep every unit's pattern over the whole ball, where the network then is linear: the first term is its
worst-case hinge loss exactly, and the optimum an upper bound of what unrestricted networks could reach.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError, needed
from ..seeds import as_generator
from .inputs import as_classes, as_examples, like
from .network import TwoLayerReLU, recover
from .patterns import distinct, sample_patterns


class RobustReLUClassifier:
    r"""Fit a two-layer ReLU network of two classes against shifts ‖δ‖∞ ≤ ε of each example, by a convex programme.

    eps: ε ≥ 0, in X's units. beta: weight decay against the mean hinge loss. num_patterns: drawn, half of them on
    shifted examples; each is kept once. solver: cvxpy's name of one, `None` its own choice. The column of ones that
    `fit_intercept` adds is not shifted.

    `fit(X, y)` sets `network_`, `objective_` (the programme's value), `worst_hinge_` (its first term: the network's mean
    worst-case hinge loss on X), `classes_`, `num_patterns_`. Then `decision_function` and `predict`. Needs the
    package cvxpy; raises `UserError` without it, for settings out of range, labels not of two classes, and where the
    solver fails. Not for more than some hundred examples or patterns: each example meets each pattern in a constraint.

    Source: Bai, Gautam, Gai & Sojoudi 2022, Practical Convex Formulation of Robust One-hidden-layer Neural Network Training,
    ACC (arXiv:2105.12237).
    """

    network_: TwoLayerReLU
    objective_: float
    worst_hinge_: float
    num_patterns_: int
    classes_: Any

    def __init__(
        self, eps: float, beta: float = 1e-3, *, num_patterns: int = 40, fit_intercept: bool = True,
        solver: str | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if not (eps >= 0 and beta >= 0):
            raise UserError(f"eps and beta of at least 0 are needed; got {eps} and {beta}; give such values")
        self.eps, self.beta, self.num_patterns = eps, beta, num_patterns
        self.fit_intercept, self.solver, self.seed = fit_intercept, solver, seed

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to labels y (n) of two classes."""
        examples = as_examples(X, self.fit_intercept)
        self.classes_, signs = as_classes(y)
        if len(signs) != len(examples):
            raise UserError(f"one label an example is needed; got {len(signs)} for {len(examples)}; match them")
        patterns = self._patterns(examples)
        self.num_patterns_ = patterns.shape[1]
        v, self.objective_, self.worst_hinge_ = _programme(
            examples.cpu().numpy(), signs.cpu().numpy(), patterns.cpu().numpy(), self.eps, self.beta,
            examples.shape[1] - int(self.fit_intercept), self.solver,
        )  # fmt: skip
        self.network_ = recover(torch.from_numpy(v).to(examples))
        return self

    def decision_function(self, X: Any) -> Any:
        """Return the outputs (n); positive: the second class."""
        return like(X, self._outputs(X))

    def predict(self, X: Any) -> Any:
        """Return the likelier label of each example."""
        outputs = self._outputs(X)
        return self.classes_[like(X, (outputs > 0).long())]

    def _outputs(self, X: Any) -> Tensor:
        if not hasattr(self, "network_"):
            raise UserError("a fitted estimator is needed; got one that is not; call fit(X, y) first")
        return self.network_(as_examples(X, self.fit_intercept))

    def _patterns(self, examples: Tensor) -> Tensor:
        """Patterns of the examples, and of the examples somewhere in their balls."""
        generator = as_generator(self.seed, examples.device)
        plain = sample_patterns(examples, max(1, self.num_patterns // 2), generator)
        shift = 2 * torch.rand(examples.shape, generator=generator, dtype=examples.dtype, device=examples.device) - 1
        if self.fit_intercept:
            shift[:, -1] = 0.0
        shifted = sample_patterns(examples + self.eps * shift, max(1, self.num_patterns // 2), generator)
        return distinct(torch.cat([plain, shifted], 1))


def _programme(
    X: np.ndarray, y: np.ndarray, patterns: np.ndarray, eps: float, beta: float, num_shifted: int, solver: str | None
) -> tuple[np.ndarray, float, float]:
    """Return v (2, P, d), the objective and its first term; the first `num_shifted` features are shifted."""
    cp = _cvxpy()
    n, d = X.shape
    passes = patterns.astype(float)
    v, w = cp.Variable((passes.shape[1], d)), cp.Variable((passes.shape[1], d))
    through = passes @ (v - w)
    outputs = cp.sum(cp.multiply(through, X), axis=1)
    worst = cp.pos(1 - cp.multiply(y, outputs) + eps * cp.norm1(through[:, :num_shifted], axis=1))
    hinge = cp.sum(worst) / n
    decay = beta * cp.sum(cp.norm(v, 2, axis=1) + cp.norm(w, 2, axis=1))
    constraints = [_keeps_patterns(cp, weights, X, passes, eps, num_shifted) for weights in (v, w)]
    problem = cp.Problem(cp.Minimize(hinge + decay), constraints)
    try:
        problem.solve(solver=solver)
    except cp.error.SolverError as error:
        raise UserError(f"a conic solver that succeeds is needed; got: {error}; give another solver") from error
    if problem.status not in ("optimal", "optimal_inaccurate"):
        raise UserError(f"a solved programme is needed; it is {problem.status}; scale the features, or another solver")
    return np.stack([v.value, w.value]), float(problem.value), float(hinge.value)


def _keeps_patterns(cp: Any, weights: Any, X: np.ndarray, passes: np.ndarray, eps: float, num_shifted: int) -> Any:
    margins = cp.multiply(2 * passes - 1, X @ weights.T)
    shift = cp.reshape(cp.norm1(weights[:, :num_shifted], axis=1), (1, passes.shape[1]), order="C")
    return margins >= eps * (np.ones((len(X), 1)) @ shift)


def _cvxpy() -> Any:
    return needed("cvxpy", "the robust classifier")
