"""Finds layouts for stages: the fastest on one stage's ranks, those that rest in a share of memory, and those that prices find.

The seconds T and the bytes at rest B (parameters and optimizer states) of all layouts have a lower hull. Its ends are the
fastest layouts and those that rest in least; between two neighbouring points of it that are known, the layouts with the least

    T + p B,     p = (T_lean - T_fast) / (B_fast - B_lean)

are a further one, or prove that there is none. The pair with most bytes between it is looked at first. No budget is needed to
find these, so where little memory is left for what rests, they are there too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..model.decode import read_choice
from ..problem.problem import Decision
from ..search.answer import Settings
from ..search.solve import Solver
from ..search.stages import solve_in_stages

Layouts = Mapping[Decision, int]

SHARES = (0.8, 0.5, 0.3)
"""The shares of all stages' memory budgets that parameters and optimizer states may take in the further layouts."""
MOST_PRICED = 4
"""The most layouts that prices find, the leanest among them."""
_LEAST = 1e-9
"""The share by which layouts have to be below a line to be a further point of the hull."""


def layouts_for(solver: Solver, settings: Settings, room_bytes: float, prices: bool) -> list[Layouts]:
    """Return the layouts to try for stages that have `room_bytes` together, the fastest first; none where there are none.

    Where memory is no bound the fastest are all. prices: whether prices find further ones.
    """
    fastest = solver.without_memory(settings)
    if fastest.values is None:
        return []
    first = read_choice(fastest.values, solver.plain()[1], None).options
    found: list[Layouts] = [first]
    if math.isfinite(room_bytes):
        within = (solver.first_stage(settings, share * room_bytes, first) for share in SHARES)
        found += [other for other in within if other is not None]
        if prices:
            found += [point.options for point in _Priced(solver, settings).hull(fastest.values)]
    return list({tuple(options.values()): options for options in found}.values())


@dataclass(frozen=True, eq=False)
class _Point:
    """Layouts with the seconds that they take, and the bytes in which they rest."""

    seconds: float
    num_bytes: float
    options: Layouts


class _Priced:
    """Solves the sharding with a price on each byte at rest."""

    def __init__(self, solver: Solver, settings: Settings) -> None:
        self.solver, self.settings = solver, settings
        self.model, self.sharding = solver.plain()
        self.seconds = np.array(self.model.cost)
        self.num_bytes = np.zeros(self.model.num_columns)
        for decision in solver.problem.params:
            for option, column in enumerate(self.sharding.choice[decision]):
                self.num_bytes[column] = decision.resting_bytes(option)

    def hull(self, fastest: np.ndarray) -> list[_Point]:
        """Return layouts on the hull beside the fastest, at most `MOST_PRICED`."""
        known = [self.point(fastest)]
        lean = self.cheapest(known[0].seconds / max(1.0, self._least_bytes()))
        if lean is None or lean.num_bytes >= known[0].num_bytes:
            return []
        known.append(lean)
        pairs = [(known[0], lean)]
        while pairs and len(known) <= MOST_PRICED:
            fast, slow = pairs.pop(
                max(range(len(pairs)), key=lambda at: pairs[at][0].num_bytes - pairs[at][1].num_bytes)
            )
            price = (slow.seconds - fast.seconds) / (fast.num_bytes - slow.num_bytes)
            between = self.cheapest(price)
            line_s = fast.seconds + price * fast.num_bytes
            if between is None or between.seconds + price * between.num_bytes >= line_s * (1 - _LEAST):
                continue
            known.append(between)
            pairs += [(fast, between), (between, slow)]
        return known[1:]

    def _least_bytes(self) -> float:
        """Return the bytes at rest of the leanest layouts of each parameter by itself."""
        return sum(
            min(map(decision.resting_bytes, range(len(decision.options)))) for decision in self.solver.problem.params
        )

    def cheapest(self, price: float) -> _Point | None:
        """Return the layouts that take least at a price in seconds a byte."""
        cost = dict(enumerate((self.seconds + price * self.num_bytes).tolist()))
        solution = solve_in_stages(self.settings.stages(self.model, self.sharding), cost)
        return None if solution.values is None else self.point(solution.values)

    def point(self, values: np.ndarray) -> _Point:
        options = read_choice(values, self.sharding, None).options
        return _Point(float(self.seconds @ values), float(self.num_bytes @ values), options)
