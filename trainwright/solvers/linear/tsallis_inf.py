"""Tsallis-INF over a grid of parameters, without context and with the context sorted into bins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...artifacts import UserError
from .tuner import OMEGAS, Tuner, check_interval

NUM_BISECTIONS = 60


class TsallisINF(Tuner):
    """Learn the best single value of a grid, with the ½-Tsallis-entropy bandit.

        p_i = 4 / (η_t (K_i/s − x))²,  η_t = 2/√t,  x such that Σ p = 1;   K_i += loss/p_i for the value chosen,

    s the running mean of the losses (cost minus `floor`). The mean cost tends to that of the best *fixed* value of the
    grid, with regret O(√(d T)); where the best value changes from system to system and something is known of each,
    `TsallisINFCB` or `ChebCB` reach less. Not for short streams: with d = 20 values it explores for some hundred rounds.

    >>> tuner = TsallisINF(grid=[1.0, 1.5], seed=0)
    >>> for _ in range(200):
    ...     tuner.observe(10.0 if tuner.suggest() == 1.5 else 30.0)
    >>> int(tuner.probabilities.argmax())
    1

    Source: Khodak et al., *Learning to Relax*, ICLR 2024; Zimmert & Seldin, JMLR 2021. Departures: the normaliser x by
    bisection (Newton's iteration can diverge); losses of zero leave the scale at one.
    """

    def __init__(
        self, grid: Sequence[float] = OMEGAS, seed: int | np.random.Generator = 0, *, floor: float = 1.0
    ) -> None:
        super().__init__(grid, seed, floor)
        self.losses = np.zeros(self.grid.size)
        self.loss_sum = 0.0

    def _probabilities(self, context: float) -> np.ndarray:
        scale = self.loss_sum / self.num_rounds if self.loss_sum > 0 else 1.0
        return tsallis_weights(self.losses / scale, 2 / math.sqrt(self.num_rounds + 1))

    def _learn(self, arm: int, loss: float, context: float) -> None:
        self.losses[arm] += loss / self.probabilities[arm]
        self.loss_sum += loss


def tsallis_weights(losses: np.ndarray, rate: float) -> np.ndarray:
    """Return p_i = 4/(rate (losses_i − x))² with Σ p = 1, x < min losses, by bisection on x.

    >>> tsallis_weights(np.array([0.0, 0.0]), 1.0).tolist()
    [0.5, 0.5]
    """
    # Σp ≥ 1 at the upper end (the least loss alone has p = 1), and ≤ 1 at the lower (all p ≤ 1/d).
    low, high = losses.min() - 2 * math.sqrt(losses.size) / rate, losses.min() - 2 / rate
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if (4 / (rate * (losses - middle)) ** 2).sum() < 1 else (low, middle)
    weights = 4 / (rate * (losses - low)) ** 2
    return weights / weights.sum()


class TsallisINFCB(Tuner):
    """Learn the best value for each of `num_bins` equal bins of the context in [low, high]: a `TsallisINF` a bin.

    Contexts beyond the ends fall into the end bins. Its regret against the best Lipschitz policy is O(T^(2/3)) for the
    best number of bins; each bin explores on its own, so short streams favour few bins.

    >>> tuner = TsallisINFCB(0.0, 1.0, num_bins=2, grid=[1.0, 1.5], seed=0)
    >>> for round in range(400):
    ...     context = (round % 2) * 0.9
    ...     tuner.observe(10.0 if (tuner.suggest(context) == 1.5) == (context > 0.5) else 30.0)
    >>> [int(learner.losses.argmin()) for learner in tuner.learners]
    [0, 1]

    Source: Khodak et al., *Learning to Relax*, ICLR 2024.
    """

    needs_context = True

    def __init__(
        self, low: float, high: float, num_bins: int = 5, grid: Sequence[float] = OMEGAS,
        seed: int | np.random.Generator = 0, *, floor: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(grid, seed, floor)
        check_interval(low, high)
        if num_bins < 1:
            raise UserError(f"at least one bin is needed; got num_bins={num_bins}; the paper uses 5")
        self.low, self.high = low, high
        self.learners = [TsallisINF(self.grid.tolist(), self.random, floor=floor) for _ in range(num_bins)]

    def _learner(self, context: float) -> TsallisINF:
        place = int((context - self.low) / (self.high - self.low) * len(self.learners))
        return self.learners[min(max(place, 0), len(self.learners) - 1)]

    def _probabilities(self, context: float) -> np.ndarray:
        learner = self._learner(context)
        learner.probabilities = learner._probabilities(context)
        return learner.probabilities

    def _learn(self, arm: int, loss: float, context: float) -> None:
        learner = self._learner(context)
        learner.num_rounds += 1
        learner._learn(arm, loss, context)
