"""Bounds of columns that their rows imply: of a sum, what it adds up to; of a largest of several, the most that one may be.

Branching asks many relaxations that have no solution. The proof is a sum of rows that cannot be met within the columns' bounds.
What rounding leaves there of a column without a bound spoils it, and the simplex method goes on, one factorisation a pivot,
in search of another proof. Of a column that has a bound, small remainders are forgiven.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from .milp import Model

SLACK = 1e-3
"""Implied bounds are this much wider, so that no optimum is held by one."""


def bound_columns(model: Model) -> None:
    """Give each column that lacks a bound the one that its rows imply, as far as they imply one.

    Where rows ask for no less than something of a column that costs, no optimum needs more than the most that they may ask
    for. Call it once all rows are there which ask for anything.
    """
    lower, upper = np.array(model.lower), np.array(model.upper)
    rows = _Rows(model, lower, upper)
    found, waiting = True, list(rows.of)
    while found:
        for column in waiting:
            least, most = rows.implied(column)
            if math.isinf(lower[column]):
                lower[column] = least - SLACK * (1 + abs(least))
            if math.isinf(upper[column]):
                upper[column] = most + SLACK * (1 + abs(most))
        left = [column for column in waiting if math.isinf(lower[column]) or math.isinf(upper[column])]
        found, waiting = len(left) < len(waiting), left
    model.lower, model.upper = lower.tolist(), upper.tolist()


class _Rows:
    """The rows of the columns that lack a bound."""

    def __init__(self, model: Model, lower: np.ndarray, upper: np.ndarray) -> None:
        self.lower, self.upper, self.costs = lower, upper, model.cost
        self.row_lower, self.row_upper, self.starts = model.row_lower, model.row_upper, model.starts
        self.indices, self.coefficients = np.array(model.indices), np.array(model.coefficients)
        places = np.flatnonzero(np.isinf(lower[self.indices]) | np.isinf(upper[self.indices]))
        self.of: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Column → its rows, each with the place of its coefficient."""
        for place, row in zip(places.tolist(), np.searchsorted(self.starts, places, side="right").tolist()):
            self.of[int(self.indices[place])].append((row - 1, place))

    def implied(self, column: int) -> tuple[float, float]:
        """Return the least and the most that a column may be, as far as its rows say."""
        least, most, asked = -math.inf, math.inf, max(0.0, float(self.lower[column]))
        for row, place in self.of[column]:
            # the row as  low ≤ column − rest ≤ high, with rest from `rest_low` to `rest_high`
            own = self.coefficients[place]
            low, high = sorted((self.row_lower[row] / own, self.row_upper[row] / own))
            rest_low, rest_high = self._rest(row, place)
            if math.isfinite(high):
                most = min(most, rest_high + high)
            if math.isfinite(low):
                least, asked = max(least, rest_low + low), max(asked, rest_high + low)
        return least, min(most, asked) if self.costs[column] >= 0 else most

    def _rest(self, row: int, place: int) -> tuple[float, float]:
        """Return the least and the most of the other terms of a row, brought to its right side and divided by that coefficient."""
        others = np.r_[self.starts[row] : place, place + 1 : self.starts[row + 1]]
        columns, weights = self.indices[others], -self.coefficients[others] / self.coefficients[place]
        first, last = weights * self.lower[columns], weights * self.upper[columns]
        return float(np.minimum(first, last).sum()), float(np.maximum(first, last).sum())
