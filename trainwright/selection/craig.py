"""CRAIG: a weighted subset whose gradient sum is near that of all examples, whatever the weights of the model."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..artifacts import Estimator, UserError, check_range
from .facility_location import Chosen, Distances, greedi, lazy_greedy, merged, stochastic_greedy
from .inputs import as_features, as_labels, drawn_from, is_whole, like
from .sizes import class_sizes

_GREEDY = ("lazy", "stochastic", "greedi")
_METRICS = ("euclidean", "cosine")


class CRAIG(Estimator):
    r"""Choose S and weights γ with Σ_i ∇f_i(w) ≈ Σ_{j in S} γ_j ∇f_j(w), by facility location in each class.

    The error is at most L(S) = Σ_i min_{j in S} max_w ‖∇f_i(w) - ∇f_j(w)‖, which for linear models with labels is bounded by
    distances of features within a class; γ_j counts the points that j stands for, so that the weights of a class
    sum to its size. For deep networks, features are gradient proxies of the last layer (`last_layer_gradients`),
    chosen anew every few epochs (`Reselection`).

    fraction: of each class that is kept, rounded up, one at least. budget: examples in all, in place of `fraction`.
    per_class: share them in proportion to the classes (`proportional`) or equally (`equal`). radius: in place of
    both, the smallest subset that greedy finds with L(S) ≤ radius in every class (the cover form). greedy: `lazy` (as
    plain greedy), `stochastic` (some candidates a step, at least 1 - 1/e - delta of the best on average), or `greedi` (in
    `num_parts` parts, then merged). metric: `euclidean` or `cosine` (1 - cosine). normalise: weights then sum to the number chosen.
    seed: of what is drawn.

    `fit(X, y)` takes X [n, d] and labels y [n] (or none), tensors or arrays, and sets `indices_` [k] (class by class, in
    greedy's order), `weights_` [k], `objective_` (L(S), summed over the classes), `num_evaluations_`. Raises
    `UserError` for settings out of range and for inputs that do not match or are not finite.

    It does not win where points are few to the class or gradients all alike (near convergence, p - y is almost zero and
    the subset arbitrary). Time is O(n k d) with the lazy greedy, memory O(n).

    >>> X = torch.tensor([0.0, 0.1, 0.3, 5.0, 5.1, 5.3, 5.6])
    >>> chosen = CRAIG(budget=2).fit(X)
    >>> chosen.indices_.tolist(), chosen.weights_.tolist()
    ([3, 1], [4.0, 3.0])

    Source: Mirzasoleiman, Bilmes & Leskovec 2020, Coresets for Data-efficient Training of Machine Learning Models, ICML
    (arXiv:1906.01827). The authors' code maximises log(1 + F/F(V)), which chooses in the same order.
    """

    indices_: Any
    weights_: Any
    objective_: float
    num_evaluations_: int

    def __init__(
        self, fraction: float = 0.1, *, budget: int | None = None, radius: float | None = None,
        per_class: str = "proportional", greedy: str = "lazy", metric: str = "euclidean", delta: float = 0.1,
        num_parts: int = 4, normalise: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        check_range(
            "CRAIG",
            fraction=(fraction, "in (0, 1]", lambda value: 0.0 < value <= 1.0),
            budget=(budget, "whole, of at least 1", lambda value: value is None or (is_whole(value) and value >= 1)),
            seed=(seed, "whole", is_whole),
            radius=(radius, "of at least 0", lambda value: value is None or value >= 0.0),
            per_class=(per_class, "proportional or equal", lambda value: value in ("proportional", "equal")),
            greedy=(greedy, f"one of {', '.join(_GREEDY)}", lambda value: value in _GREEDY),
            metric=(metric, f"one of {', '.join(_METRICS)}", lambda value: value in _METRICS),
            delta=(delta, "in (0, 1)", lambda value: 0.0 < value < 1.0),
            num_parts=(num_parts, "of at least 1", lambda value: value >= 1),
        )
        if budget is not None and radius is not None:
            raise UserError("CRAIG needs budget or radius; got both; leave one out")
        self.fraction, self.budget, self.radius, self.per_class = fraction, budget, radius, per_class
        self.greedy, self.metric, self.delta, self.num_parts = greedy, metric, delta, num_parts
        self.normalise, self.seed = normalise, seed

    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose the subset of X [n, d], class by class where labels y [n] are given."""
        features = as_features(X)
        classes = [torch.arange(len(features), device=features.device)] if y is None else as_labels(y, features)
        generator = drawn_from(self.seed)
        parts = []
        for places, size in zip(classes, self._sizes([len(places) for places in classes])):
            parts.append((places, self._choose(Distances(features[places], self.metric), size, generator)))
        indices, weights = merged(parts)
        if self.normalise:
            weights = weights * (len(weights) / weights.sum())
        self.indices_, self.weights_ = like(X, indices), like(X, weights)
        self.objective_ = sum(chosen.total_distance for _, chosen in parts)
        self.num_evaluations_ = sum(chosen.num_evaluations for _, chosen in parts)
        return self

    def _sizes(self, sizes: list[int]) -> list[int]:
        """How many of each class are chosen, at most."""
        return sizes if self.radius is not None else class_sizes(sizes, self.fraction, self.budget, self.per_class)

    def _choose(self, distances: Distances, size: int, generator: torch.Generator) -> Chosen:
        radius = self.radius if self.radius is not None else -1.0
        if self.greedy == "stochastic":
            return stochastic_greedy(distances, size, generator, self.delta, radius)
        if self.greedy == "greedi":
            return greedi(distances, size, generator, self.num_parts, radius)
        return lazy_greedy(distances, size, radius)


def gradient_error(gradients: Tensor, indices: Tensor, weights: Tensor) -> float:
    """Return ‖Σ_i g_i - Σ_j γ_j g_j‖ / ‖Σ_i g_i‖ for gradients [n, p]: how well a weighted subset stands for all.

    >>> gradients = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> gradient_error(gradients, torch.tensor([0, 2]), torch.tensor([2.0, 1.0]))
    0.0
    """
    whole = gradients.sum(0)
    part = (weights.to(gradients)[:, None] * gradients[indices]).sum(0)
    return float((whole - part).norm() / whole.norm())
