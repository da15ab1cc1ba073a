"""Gradients from values: a Gaussian process over past queries, and the same in random features that fit into a message.

With the kernel k(x, x') = exp(-‖x - x'‖² / 2ℓ²), values y at the points X and K = k(X, X) + σ² I:

    gradient of the mean        ∂_x k(x, X) K⁻¹ y,   ∂_x k(x, X_a) = -(x - X_a)/ℓ² k(x, X_a)        `GaussianProcess.gradient`
    its variance, summed        d/ℓ² - tr ∂k K⁻¹ ∂kᵀ                                                  `gradient_variance`
    random features             φ(x) = √(2/M) cos(v·x + b),  v ~ N(0, I/ℓ²),  b ~ U(0, 2π)            `RandomFeatures`
    their weights               w = Φᵀ(ΦΦᵀ + σ² I)⁻¹ y                                                `RandomFeatures.weights`
    gradient in features        -√(2/M) Σ_m w_m sin(v_m·x + b_m) v_m                                  `RandomFeatures.gradient`

All gradients are these formulas; nothing is differentiated numerically.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from ..artifacts import UserError, check_range
from .checks import positive, whole


def default_length_scale(dim: int, spread: float = 1.0) -> float:
    """Return ℓ for functions that vary over distances of about `spread` in each of `dim` coordinates: 0.63 √dim spread.

    Points of [0, 1]^d lie √(d/6) apart: with an ℓ that does not grow with √d the kernel is 0 between any two of them.

    >>> round(default_length_scale(10), 2)
    1.99
    """
    check_range(
        "default_length_scale",
        dim=(dim, "whole, of at least 1", whole()),
        spread=(spread, "above 0 and finite", positive),
    )
    return 0.63 * math.sqrt(dim) * spread


class GaussianProcess:
    """The posterior of a function given values y [q] at points X [q, d], its mean taken off and its spread scaled to one.

    noise: σ² in units of the values' variance. Time O(q³) to fit, O(q d) a gradient, O(q² + q d) a variance.

    >>> X = np.random.default_rng(0).normal(size=(30, 3))
    >>> GaussianProcess(X, (X**2).sum(1), 3.0).gradient(np.array([0.5, 0.0, -0.5])).round(1)
    array([ 1. , -0.1, -1. ])
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, length_scale: float, noise: float = 1e-6) -> None:
        self.points, self.length_scale = _checked(points, values, length_scale, noise), length_scale
        standard, self.mean, self.spread = standardised(values)
        kernel = _kernel(squared_distances(self.points, self.points), length_scale)
        kernel[np.diag_indices_from(kernel)] += noise
        self._factor = _factor(kernel, noise)
        self._coefficients = cho_solve(self._factor, standard)

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Return the gradient of the posterior mean at x [d]."""
        apart = x - self.points
        weights = _kernel((apart**2).sum(1), self.length_scale) * self._coefficients
        return -self.spread / self.length_scale**2 * (weights @ apart)

    def gradient_variance(self, candidates: np.ndarray) -> np.ndarray:
        """Return the variances of the gradient's entries, added up, at each of the candidates [c, d], for values of spread one."""
        inverse = cho_solve(self._factor, np.eye(len(self.points)))
        to_points = squared_distances(candidates, self.points)
        between = squared_distances(self.points, self.points)
        kernels = _kernel(to_points, self.length_scale)
        # ∂k_a · ∂k_b needs (x - X_a)·(x - X_b) alone, which is half of ‖x - X_a‖² + ‖x - X_b‖² - ‖X_a - X_b‖²
        explained = ((kernels * to_points) * (kernels @ inverse)).sum(1)
        explained -= 0.5 * (kernels * (kernels @ (inverse * between))).sum(1)
        return candidates.shape[1] / self.length_scale**2 - explained / self.length_scale**4


class RandomFeatures:
    """M random features of the kernel, the same for whoever has `seed`, `num_features`, `dim`, `length_scale`; check the `digest`.

    >>> features = RandomFeatures(dim=2, num_features=8, length_scale=1.0, seed=0)
    >>> features.digest == RandomFeatures(dim=2, num_features=8, length_scale=1.0, seed=0).digest
    True
    """

    def __init__(self, dim: int, num_features: int, length_scale: float, seed: int = 0) -> None:
        check_range(
            "RandomFeatures", dim=(dim, "whole, of at least 1", whole()),
            num_features=(num_features, "whole, of at least 1", whole()),
            length_scale=(length_scale, "above 0 and finite", positive), seed=(seed, "whole, of at least 0", whole(0)),
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        self.frequencies = rng.standard_normal((num_features, dim)) / length_scale
        self.phases = rng.uniform(0.0, 2.0 * math.pi, num_features)
        self._scale = math.sqrt(2.0 / num_features)
        self.digest = hashlib.sha256(self.frequencies.tobytes() + self.phases.tobytes()).hexdigest()

    def at(self, points: np.ndarray) -> np.ndarray:
        """Return φ of the points [q, d], [q, M]."""
        return self._scale * np.cos(points @ self.frequencies.T + self.phases)

    def weights(self, points: np.ndarray, values: np.ndarray, noise: float = 1e-6) -> np.ndarray:
        """Return w [M] with φ(x)·w near the values, but for their mean; in the values' own units, so that w may be averaged."""
        standard, _, spread = standardised(values)
        phi = self.at(points)
        kernel = phi @ phi.T
        kernel[np.diag_indices_from(kernel)] += noise
        return spread * (phi.T @ cho_solve(_factor(kernel, noise), standard))

    def gradient(self, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the gradient of φ(x)·w at x [d]."""
        return -self._scale * ((weights * np.sin(self.frequencies @ x + self.phases)) @ self.frequencies)


@functools.lru_cache(maxsize=2)
def shared_features(dim: int, num_features: int, length_scale: float, seed: int, digest: str) -> RandomFeatures:
    """Return the features that a server named; `UserError` where this installation draws others."""
    found = RandomFeatures(dim, num_features, length_scale, seed)
    if digest and found.digest != digest:
        raise UserError(
            f"the server's random features are needed (hash {digest[:12]}); numpy {np.__version__} drew others from its seed "
            f"({found.digest[:12]}); install the server's version of numpy"
        )
    return found


def standardised(values: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return the values with mean 0 and spread 1, and both of what was taken off.

    >>> standardised(np.array([1.0, 3.0]))
    (array([-1.,  1.]), 2.0, 1.0)
    """
    values = np.asarray(values, np.float64)
    mean, spread = float(values.mean()), float(values.std())
    spread = spread if spread > 0 else 1.0
    return (values - mean) / spread, mean, spread


def squared_distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return ‖a - b‖² for each pair of rows.

    >>> squared_distances(np.zeros((1, 2)), np.array([[3.0, 4.0]]))
    array([[25.]])
    """
    middle = other.mean(0)  # nearby points far from the origin: their squares would cancel
    one, other = one - middle, other - middle
    found = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2.0 * one @ other.T
    return np.maximum(found, 0.0)


def _checked(points: np.ndarray, values: np.ndarray, length_scale: float, noise: float) -> np.ndarray:
    points = np.asarray(points, np.float64)
    check_range(
        "GaussianProcess", length_scale=(length_scale, "above 0 and finite", positive),
        noise=(noise, "of at least 0", lambda value: value >= 0),
        points=(points, "[q, d], finite, with q at least 1",
                lambda value: value.ndim == 2 and value.size and np.isfinite(value).all()),
        values=(np.asarray(values, np.float64), "[q], finite, one a point",
                lambda value: value.shape == points.shape[:1] and np.isfinite(value).all()),
    )  # fmt: skip
    return points


def _factor(kernel: np.ndarray, noise: float) -> Any:
    try:
        return cho_factor(kernel, lower=True)
    except np.linalg.LinAlgError:
        raise UserError(
            f"a larger noise is needed: with {noise:g} points that lie (almost) in one place cannot be told apart; try 1e-6 or more"
        ) from None


def _kernel(squared: np.ndarray, length_scale: float) -> np.ndarray:
    return np.exp(squared / (-2.0 * length_scale**2))
