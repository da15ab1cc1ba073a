"""A thin builder of mixed-integer linear programs over HiGHS: columns, named rows, and solves that share one model."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .deadline import LEAST_S, Deadline
from .outcome import Outcome

Terms = list[tuple[int, float]]
"""Columns with their coefficients."""
MIB = 2.0**20
"""Rows of bytes are in MiB, so that coefficients stay near 1."""
INFINITY = math.inf
Progress = Callable[[float, float], None]
"""Called as (best objective, bound)."""
_PIVOT_S, _PIVOT_ENTRY_S, _PIVOT_PAIR_S = 5e-6, 0.6e-9, 1.2e-12
"""The work of a pivot of the simplex method in a relaxation, and of each coefficient of the model and each pair of rows in it."""
_WARM_ENTRY_S = 230e-9
"""The work of each coefficient before the first pivot of a relaxation that is solved again: its basis is factorised, and the
weights by which pivots are chosen are computed anew."""
_NODE_PIVOT_S, _NODE_PIVOT_ENTRY_S = 150e-6, 0.5e-9
"""The work of a pivot in branch and bound, with the cuts, the heuristics and the propagation that go with it."""
_BEGIN_ENTRY_S = 0.8e-6
"""The work of each coefficient before a solve: its row written, passed on and presolved."""
_MOST_PIVOTS = 2**31 - 2
_PIVOTS = re.compile(r"%.*\s(\d+)([km]?)\s+[\d.]+s\s*$")
"""The end of a line of the solver's log: the pivots so far, in thousands or millions where they are many, and the time."""


@dataclass(frozen=True)
class Patience:
    """After so many seconds of work, a solution proven to be within `gap` of the optimum will do.

    Where it grows, after n times as many within n times the gap."""

    seconds: float
    gap: float
    grows: bool = False

    def gap_after(self, seconds: float) -> float:
        """Return the gap that will do after so many seconds.

        >>> [Patience(2.0, 5e-3, grows=True).gap_after(seconds) for seconds in (1.0, 3.0, 8.0)]
        [0.0, 0.0075, 0.02]
        """
        if seconds <= self.seconds:
            return 0.0
        return self.gap * seconds / self.seconds if self.grows else self.gap


@dataclass(frozen=True)
class Solution:
    """The result of one solve; `values` is None if it found no solution."""

    outcome: Outcome
    values: np.ndarray | None
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """The proven distance from the optimum, as a fraction of the objective."""
        if self.values is None or not math.isfinite(self.bound):
            return INFINITY
        return max(0.0, (self.objective - self.bound) / max(abs(self.objective), 1e-12))


class Model:
    """min cost · x subject to named rows lower ≤ a · x ≤ upper, bounds, and some columns integer."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self.row_names: list[str] = []
        self.starts: list[int] = [0]
        self.indices: list[int] = []
        self.coefficients: list[float] = []

    @property
    def num_columns(self) -> int:
        return len(self.cost)

    @property
    def num_rows(self) -> int:
        return len(self.row_lower)

    def column(self, upper: float = INFINITY, cost: float = 0.0, integer: bool = False, lower: float = 0.0) -> int:
        """Add a column and return its index."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def one(self, cost: float = 0.0) -> int:
        """Add a column that is 1, for the constants of rows or of the objective, and return its index."""
        return self.column(lower=1.0, upper=1.0, cost=cost)

    def row(
        self, name: str, terms: Iterable[tuple[int, float]], lower: float = -INFINITY, upper: float = INFINITY
    ) -> int:
        """Add the row `lower ≤ Σ coefficient · column ≤ upper` to the group `name` and return its index."""
        merged: dict[int, float] = {}
        for column, coefficient in terms:
            merged[column] = merged.get(column, 0.0) + coefficient
        for column, coefficient in merged.items():
            if coefficient != 0.0:
                self.indices.append(column)
                self.coefficients.append(coefficient)
        self.starts.append(len(self.indices))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.row_names.append(name)
        return len(self.row_lower) - 1

    def largest(self, name: str, alternatives: Iterable[Terms]) -> Terms:
        """Return the terms of the largest of several sums, at least 0: a column that is no less than each."""
        found = [terms for terms in alternatives if terms]
        if len(found) < 2 and all(factor >= 0 for terms in found for _, factor in terms):
            return found[0] if found else []
        most = self.column()
        for terms in found:
            self.row(name, [*terms, (most, -1.0)], upper=0.0)
        return [(most, 1.0)]

    @contextlib.contextmanager
    def extra_rows(self) -> Iterator[None]:
        """Drop the rows that are added inside at the end."""
        num_rows = self.num_rows
        try:
            yield
        finally:
            for each in (self.row_lower, self.row_upper, self.row_names):
                del each[num_rows:]
            del self.starts[num_rows + 1 :]
            del self.indices[self.starts[-1] :], self.coefficients[self.starts[-1] :]

    def solve(
        self,
        *,
        relaxed: bool = False,
        fixed: Mapping[int, float] | None = None,
        cost: Mapping[int, float] | None = None,
        start: np.ndarray | None = None,
        time_limit_s: float = 30.0,
        gap: float = 1e-3,
        patience: Patience | None = None,
        progress: Progress | None = None,
        deadline: Deadline | None = None,
        cutoff: float = INFINITY,
    ) -> Solution:
        """Solve the model, or a variation of it.

        relaxed: without integrality. fixed: columns held at a value. cost: an objective in place of the model's own.
        start: values to begin from. gap: stop within this fraction of the optimum. patience: when more than that will do.
        cutoff: stop once no solution is proven to be below it.
        time_limit_s: seconds of work, which are counted in `deadline`; where that is over, what is found so far will do.
        """
        deadline = Deadline() if deadline is None else deadline
        scale = _scale_of(self.cost if cost is None else cost.values())
        highs = self._pass(relaxed, fixed or {}, cost, scale)
        highs.setOptionValue("time_limit", deadline.wall_s)
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("threads", 1)
        # what a restart at the root proves, branching proves in less time
        highs.setOptionValue("mip_allow_restart", False)
        if start is not None and not relaxed:
            self._start(highs, start)
        if progress is not None and not relaxed:
            _listen(highs, progress, scale)
        work = self._work(relaxed)
        if not relaxed:
            _count_pivots(highs, work)
            _stop_when_good(highs, patience, time_limit_s, deadline, work, scale * cutoff)
        highs.run()
        work.pivots = max(0, highs.getInfo().simplex_iteration_count)
        deadline.count(work.seconds)
        return _read(highs, relaxed, scale)

    def _work(self, relaxed: bool) -> _Work:
        size = len(self.coefficients)
        if relaxed:
            pivot_s = _PIVOT_S + _PIVOT_ENTRY_S * size + _PIVOT_PAIR_S * self.num_rows**2
        else:
            pivot_s = _NODE_PIVOT_S + _NODE_PIVOT_ENTRY_S * size
        return _Work(_BEGIN_ENTRY_S * size, pivot_s)

    def _pass(
        self, relaxed: bool, fixed: Mapping[int, float], cost: Mapping[int, float] | None, scale: float = 1.0
    ) -> Any:
        import highspy

        lower, upper = np.array(self.lower), np.array(self.upper)
        for column, value in fixed.items():
            lower[column] = upper[column] = value
        objective = np.array(self.cost)
        if cost is not None:
            objective = np.zeros(self.num_columns)
            objective[list(cost)] = list(cost.values())
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.num_columns, self.num_rows
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = scale * objective, lower, upper
        lp.row_lower_, lp.row_upper_ = np.array(self.row_lower), np.array(self.row_upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self.starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self.indices, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self.coefficients)
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[flag] for flag in self.integer]
        highs = _silent()
        if relaxed:
            # the dual simplex from the slack basis takes half the time that it takes behind a presolve
            highs.setOptionValue("presolve", "off")
        highs.passModel(lp)
        return highs

    def relaxation(self, fixed: Mapping[int, float], cost: Mapping[int, float] | None = None) -> Relaxation:
        """Return the model without integrality, to be solved again and again under other bounds."""
        scale = _scale_of(self.cost if cost is None else cost.values())
        highs = self._pass(True, fixed, cost, scale)
        highs.setOptionValue("threads", 1)
        return Relaxation(highs, self._work(True), _WARM_ENTRY_S * len(self.coefficients), scale)

    def _start(self, highs, values: np.ndarray) -> None:
        import highspy

        solution = highspy.HighsSolution()
        solution.col_value = [float(value) for value in values]
        highs.setSolution(solution)


@dataclass
class _Work:
    """The work of one solve, by its pivots so far."""

    begin_s: float
    pivot_s: float
    pivots: int = 0

    @property
    def seconds(self) -> float:
        return self.begin_s + self.pivot_s * self.pivots


@dataclass(frozen=True)
class Vertex:
    """An optimal point of a relaxation, and the basis to go on from."""

    objective: float
    values: np.ndarray
    basis: Any


class Relaxation:
    """A linear program in memory: a change of bounds costs a few dual simplex steps from a basis near by."""

    def __init__(self, highs: Any, work: _Work, again_s: float, scale: float) -> None:
        self._highs, self._scale = highs, scale
        self._pivot_s, self._begin_s, self._again_s = work.pivot_s, work.begin_s, again_s

    def bound(self, columns: Sequence[int], uppers: Sequence[float]) -> None:
        """Let each of `columns` range from 0 to its upper bound."""
        if len(columns):
            size = len(columns)
            self._highs.changeColsBounds(
                size, np.array(columns, dtype=np.int32), np.zeros(size), np.array(uppers, float)
            )

    def charge(self, costs: Mapping[int, float]) -> None:
        """Give columns other costs."""
        columns = np.array(list(costs), dtype=np.int32)
        self._highs.changeColsCost(len(columns), columns, self._scale * np.array(list(costs.values()), float))

    def duals(self, rows: Sequence[int]) -> list[float]:
        """Return, after a solve that found the optimum, by how much it rises with each row's side."""
        found = self._highs.getSolution().row_dual
        return [float(found[row]) / self._scale for row in rows]

    def solve(
        self, basis: Any = None, cutoff: float = INFINITY, time_limit_s: float = 30.0, deadline: Deadline | None = None
    ) -> Vertex | Outcome:
        """Return the optimum from `basis` on, or why there is none: infeasible, slower than `cutoff`, stopped by the time limit.

        time_limit_s: seconds of work, which are counted in `deadline`.
        """
        import highspy

        highs = self._highs
        if basis is not None:
            highs.setBasis(basis)
        highs.setOptionValue("objective_bound", self._scale * cutoff)
        deadline = Deadline() if deadline is None else deadline
        most = max(0.0, time_limit_s) / self._pivot_s
        highs.setOptionValue("simplex_iteration_limit", int(min(most, _MOST_PIVOTS)) + 1)
        highs.setOptionValue("time_limit", highs.getRunTime() + deadline.wall_s)
        highs.run()
        info = highs.getInfo()
        deadline.count(self._begin_s + self._pivot_s * max(0, info.simplex_iteration_count))
        self._begin_s = self._again_s
        status = highs.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            objective = info.objective_function_value / self._scale
            if objective > cutoff:
                return Outcome.SLOWER
            return Vertex(objective, np.array(highs.getSolution().col_value), highs.getBasis())
        if status == highspy.HighsModelStatus.kObjectiveBound:
            return Outcome.SLOWER
        is_infeasible = status in (
            highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible
        )  # fmt: skip
        return Outcome.INFEASIBLE if is_infeasible else Outcome.STOPPED


@functools.cache
def _silent_kind() -> Any:
    import highspy

    class Silent(highspy.Highs):
        """From 1.16 on the solver prints its name where it is made, as soon as it has its callbacks."""

        def enableCallbacks(self) -> Any:
            self.setOptionValue("output_flag", False)
            return super().enableCallbacks()

    return Silent


def _silent() -> Any:
    """Return a solver that prints nothing, in any release."""
    highs = _silent_kind()()
    highs.setOptionValue("output_flag", False)
    return highs


def _scale_of(costs: Iterable[float]) -> float:
    """Return the power of two that brings the largest cost to 1: the solver's tolerances are absolute, a step may take 0.1 ms."""
    largest = max(map(abs, costs), default=0.0)
    return 2.0 ** max(0, -math.floor(math.log2(largest))) if largest > 0 else 1.0


def pivots_in(line: str) -> int | None:
    """Return the pivots that a line of the solver's log tells of; None where it tells of none.

    >>> line = " T      49       4        20  42.19%   14.8            16.04              7.77%      171     52    301{}     0.9s"
    >>> pivots_in(line.format("      2704")), pivots_in(line.format("     1234k")), pivots_in("60 cols, 1500 nonzeros 0s")
    (2704, 1234000, None)
    """
    found = _PIVOTS.search(line)
    return None if found is None else int(found[1]) * {"": 1, "k": 10**3, "m": 10**6}[found[2]]


def _count_pivots(highs: Any, work: _Work) -> None:
    """Count the pivots of branch and bound while it goes on, node by node: no callback tells them, and the log does."""

    def heard(event) -> None:
        pivots = pivots_in(event.message)
        if pivots is not None:
            work.pivots = pivots

    highs.setOptionValue("output_flag", True)
    highs.setOptionValue("log_to_console", False)
    # until 1.13 the callback is silent where neither a console nor a file is
    highs.setOptionValue("log_file", os.devnull)
    highs.setOptionValue("mip_min_logging_interval", 0.0)
    highs.cbLogging.subscribe(heard)


def _stop_when_good(
    highs: Any, patience: Patience | None, time_limit_s: float, deadline: Deadline, work: _Work, cutoff: float
) -> None:
    def asked(event) -> None:
        out = event.data_out
        is_good = patience is not None and out.mip_gap <= patience.gap_after(work.seconds)
        is_good = is_good or out.mip_dual_bound >= cutoff
        is_late = out.running_time > LEAST_S and deadline.is_over
        event.interrupt(is_good or is_late or work.seconds > time_limit_s)

    highs.cbMipInterrupt.subscribe(asked)


def _listen(highs, progress: Progress, scale: float) -> None:
    def heard(event) -> None:
        out = event.data_out
        progress(out.mip_primal_bound / scale, out.mip_dual_bound / scale)

    highs.cbMipImprovingSolution.subscribe(heard)


def _read(highs, relaxed: bool, scale: float) -> Solution:
    import highspy

    status = highs.getModelStatus()
    info = highs.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Solution(Outcome.INFEASIBLE, None, INFINITY, INFINITY)
    if not found:
        bound = info.mip_dual_bound / scale if not relaxed else -INFINITY
        return Solution(Outcome.STOPPED, None, INFINITY, bound)
    values = np.array(highs.getSolution().col_value)
    objective = info.objective_function_value / scale
    done = status == highspy.HighsModelStatus.kOptimal
    bound = objective if relaxed else info.mip_dual_bound / scale
    return Solution(Outcome.OPTIMAL if done else Outcome.FEASIBLE, values, objective, bound)
