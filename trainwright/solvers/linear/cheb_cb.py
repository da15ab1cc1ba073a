"""ChebCB: a contextual bandit whose costs are Chebyshev polynomials of a context in an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...artifacts import UserError
from .tuner import OMEGAS, Tuner, check_interval

RIDGE = 1e-9
NUM_SWEEPS = 200
SETTLED = 1e-8


class ChebCB(Tuner):
    """Learn, for every context c in [low, high], the best value of a grid, from a regression of costs on c.

        ŷ_i(c) = θ_i · (T_0, …, T_{m−1})(c scaled to [−1, 1])        costs of value i, least squares within bounds
        p_i = 1 / (d + η_t (ŷ_i − min ŷ)) for i not the best, the rest for the best         inverse gap weighting

    Unlike bins it shares what it learns along the context, so that it comes near the best value *for each system*.
    Contexts beyond the ends are taken to the ends. Not where the cost jumps with the context, or for more than one
    context (a polynomial in one number is what it fits).

    num_features: m. lipschitz_margin: multiplies the bounds on θ (the paper's 1). growth: η_t grows with t^growth beyond
    the theory's √t: 1 as in the authors' code (exploits soon, and can settle on a value that is not the best), 0 the theory.

    >>> tuner = ChebCB(-1.0, 1.0, grid=[1.0, 1.5], seed=0)
    >>> contexts = np.random.default_rng(1).uniform(-1, 1, 300)
    >>> for c in contexts:
    ...     tuner.observe(20 + 9 * c if tuner.suggest(c) == 1.5 else 20 - 9 * c)
    >>> [int(tuner.predict(c).argmin()) for c in (-0.8, 0.8)]
    [1, 0]

    Source: Khodak et al., *Learning to Relax*, ICLR 2024. As in the authors' code the range of costs is the one seen so
    far. Departure: the residual that η_t subtracts is summed over all values of the grid.
    """

    needs_context = True

    def __init__(
        self, low: float, high: float, num_features: int = 6, grid: Sequence[float] = OMEGAS,
        seed: int | np.random.Generator = 0, *, floor: float = 1.0, lipschitz_margin: float = 1.0, growth: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(grid, seed, floor)
        check_interval(low, high)
        if num_features < 1 or not lipschitz_margin > 0:
            raise UserError(
                f"num_features ≥ 1 and lipschitz_margin > 0 are needed; got {num_features} and {lipschitz_margin}; "
                "the paper uses 6 and 1"
            )
        self.low, self.high, self.lipschitz_margin, self.growth = low, high, lipschitz_margin, growth
        num_arms, size = self.grid.size, num_features
        self.theta = np.zeros((num_arms, size))
        self.gram, self.moment = np.zeros((num_arms, size, size)), np.zeros((num_arms, size))
        self.square_sum = np.zeros(num_arms)
        self.rate, self.scale = 0.0, 0.0
        self.most, self.least = 0.0, math.inf
        self.squared_error = 0.0
        """Of the predictions as they were made, in units of the cost, whose scale may change."""

    def predict(self, context: float) -> np.ndarray:
        """Return the predicted cost of each value of the grid at a context, shape (d,)."""
        return self.floor + max(self.scale, 1.0) * (self.theta @ self._features(context))

    def _features(self, context: float) -> np.ndarray:
        place = 2 * (min(max(context, self.low), self.high) - self.low) / (self.high - self.low) - 1
        return np.cos(np.arange(self.theta.shape[1]) * math.acos(place))

    def _probabilities(self, context: float) -> np.ndarray:
        gaps = self.theta @ self._features(context)
        best = int(gaps.argmin())
        weights = 1 / (self.grid.size + self.rate * (gaps - gaps[best]))
        weights[best] = 0.0
        weights[best] = 1 - weights.sum()
        return weights

    def _learn(self, arm: int, loss: float, context: float) -> None:
        features = self._features(context)
        self._record(arm, loss, features)
        cost = loss + self.floor
        self.most, self.least = max(self.most, cost), min(self.least, cost)
        spread = self.most - self.least
        bound = 2 + 4 * spread / self.most * (1 + math.log(self.theta.shape[1]))
        scale = self.most * bound
        arms = [arm] if scale == self.scale else list(range(self.grid.size))
        self.theta *= self.scale / scale
        self.scale = scale
        self._fit(arms, bound, spread)
        self.rate = self._exploitation(spread)

    def _record(self, arm: int, loss: float, features: np.ndarray) -> None:
        self.squared_error += (self.scale * float(self.theta[arm] @ features) - loss) ** 2
        self.gram[arm] += np.outer(features, features)
        self.moment[arm] += loss * features
        self.square_sum[arm] += loss**2

    def _fit(self, arms: list[int], bound: float, spread: float) -> None:
        """Least squares within the box |θ_0| ≤ 1/N, |θ_j| ≤ 2 (b − a) L/(s j)."""
        size = self.theta.shape[1]
        box = np.concatenate([[1 / bound], 2 * spread / self.scale / np.arange(1, size)]) * self.lipschitz_margin
        for arm in arms:
            gram, moment = self.gram[arm] + RIDGE * np.eye(size), self.moment[arm] / self.scale
            theta = np.linalg.solve(gram, moment)
            inside = bool((np.abs(theta) <= box).all())
            self.theta[arm] = theta if inside else box_least_squares(gram, moment, box, self.theta[arm])

    def _exploitation(self, spread: float) -> float:
        """η_t = 2 t^growth √(d t / (R − residual + 2 α² t)): R the squared errors of the predictions as they were made."""
        rounds, size = self.num_rounds, self.theta.shape[1]
        errors = self.squared_error / self.scale**2
        alpha = (math.pi + 2 / math.pi * math.log(2 * size + 1)) / (2 * self.scale * (size + 1)) * spread
        excess = max(errors - self._residual(), 0.0) + 2 * alpha**2 * rounds
        return 2 * rounds**self.growth * math.sqrt(self.grid.size * rounds / excess) if excess > 0 else 0.0

    def _residual(self) -> float:
        quadratic = np.einsum("ai,aij,aj->", self.theta, self.gram, self.theta)
        linear = np.einsum("ai,ai->", self.theta, self.moment)
        return float(quadratic - 2 * linear / self.scale + self.square_sum.sum() / self.scale**2)


def box_least_squares(gram: np.ndarray, moment: np.ndarray, box: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Minimise ½ θᵀ gram θ − momentᵀ θ over |θ| ≤ box, by coordinate descent; gram (m, m) positive definite.

    >>> box_least_squares(np.eye(2), np.array([3.0, 0.5]), np.array([1.0, 1.0]), np.zeros(2)).tolist()
    [1.0, 0.5]
    """
    theta = np.clip(start, -box, box)
    for _ in range(NUM_SWEEPS):
        before = theta.copy()
        for j in range(theta.size):
            theta[j] += (moment[j] - gram[j] @ theta) / gram[j, j]
            theta[j] = min(max(theta[j], -box[j]), box[j])
        if np.abs(theta - before).max() < SETTLED * box.max():
            break
    return theta
