"""What tunes a parameter over a stream of solves: `suggest` a value before each, `observe` its cost after."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...artifacts import UserError
from ..seeds import as_numpy_generator
from .sor import solve_sor
from .system import LinearResult

OMEGAS = tuple(np.linspace(1.0, 1.95, 20).tolist())
"""The paper's grid of relaxation parameters."""


class Tuner(ABC):
    """Choose among the values of a grid at each round, from the costs of the values chosen before.

    A cost is what is to be small, such as a number of iterations; `floor` is the smallest that it can be (1 for
    iterations). Subclasses give `_probabilities` and `_learn`. `seed`: a number or a NumPy generator.
    """

    needs_context = False

    def __init__(self, grid: Sequence[float], seed: int | np.random.Generator, floor: float = 1.0) -> None:
        self.grid = np.asarray(grid, dtype=np.float64)
        if self.grid.ndim != 1 or self.grid.size == 0 or not np.isfinite(self.grid).all():
            raise UserError(f"a grid of at least one finite value is needed; got {grid!r}; the default is OMEGAS")
        self.random, self.floor = as_numpy_generator(seed), floor
        self.num_rounds = 0
        self.probabilities = np.full(self.grid.size, 1 / self.grid.size)
        self._arm: int | None = None
        self._context = math.nan

    def suggest(self, context: float = math.nan) -> float:
        """Return the value to use in this round; `context` is what is known of the round (a number, or NaN)."""
        if self.needs_context and not math.isfinite(context):
            raise UserError(f"a finite context is needed at each suggest(); got {context}; without one use TsallisINF")
        self._context = context
        self.probabilities = self._probabilities(context)
        self._arm = int(self.random.choice(self.grid.size, p=self.probabilities))
        return float(self.grid[self._arm])

    def observe(self, cost: float) -> None:
        """Learn the cost of the value suggested last."""
        if self._arm is None:
            raise UserError(
                "suggest() is needed before each observe(); got two costs for one suggestion; call suggest()"
            )
        if not (math.isfinite(cost) and cost >= self.floor):
            raise UserError(
                f"a finite cost ≥ {self.floor:g} is needed; got {cost}; give the limit itself where the solver met it, "
                "or set floor"
            )
        self.num_rounds += 1
        arm, self._arm = self._arm, None
        self._learn(arm, cost - self.floor, self._context)

    @abstractmethod
    def _probabilities(self, context: float) -> np.ndarray:
        """Return the distribution over the grid, shape (d,), sum one."""

    @abstractmethod
    def _learn(self, arm: int, loss: float, context: float) -> None:
        """Take in the loss (cost minus `floor`) of one arm."""


def check_interval(low: float, high: float) -> None:
    if not low < high:
        raise UserError(f"an interval of contexts with low < high is needed; got [{low}, {high}]; give its ends")


@dataclass(frozen=True)
class Stream:
    """What a stream of solves cost: for each round the value used and the iterations; and how many did not converge."""

    omegas: list[float]
    costs: list[int]
    num_failed: int

    def mean_cost(self, last: int | None = None) -> float:
        """Return the mean number of iterations over the `last` rounds (all: `None`)."""
        return float(np.mean(self.costs[-last:] if last else self.costs))


def solve_stream(
    systems: Iterable[tuple[Any, Any, float]], tuner: Tuner, *, solve: Callable[..., LinearResult] = solve_sor,
    rtol: float = 1e-8, max_iterations: int = 10_000, on_result: Callable[[LinearResult], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Stream:  # fmt: skip
    """Solve a stream of systems (A, b, context) one after another, the tuner choosing ω before each and learning after.

    `solve`: `solve_sor` or `solve_ssor_pcg`. A system that meets `max_iterations` costs as many; one that diverges too, so
    that the tuner does not take an early end for a cheap one.

    >>> from trainwright.solvers.linear import TsallisINF
    >>> matrix = [[2.0, -1.0], [-1.0, 2.0]]
    >>> stream = solve_stream([(matrix, [1.0, 0.5 * t], 0.0) for t in range(5)], TsallisINF(seed=0))
    >>> len(stream.costs), stream.num_failed
    (5, 0)
    """
    omegas: list[float] = []
    costs: list[int] = []
    num_failed, told = 0, time.monotonic()
    for matrix, right, context in systems:
        omega = tuner.suggest(context)
        result = solve(matrix, right, omega, rtol=rtol, max_iterations=max_iterations)
        cost = max(result.nit, 1) if result.success else max_iterations
        tuner.observe(cost)
        num_failed += not result.success
        omegas.append(omega)
        costs.append(cost)
        if on_result is not None:
            on_result(result)
        if progress is not None and time.monotonic() - told >= 1.0:
            told = time.monotonic()
            progress(f"system {len(costs)}: omega {omega:.3g}, mean of the last 100 costs {np.mean(costs[-100:]):.4g}")
    return Stream(omegas, costs, num_failed)
