"""Solving one problem: the sharding alone, then both halves under the budget, and a simulation that has the last word.

1. without memory rows: LP → sharding by argmax → MIP. If its simulated peak fits, it is the optimum.
2. with them: LP → fix the sharding by argmax → MIP for the rest (a first answer) → MIP of everything from there.
3. simulate; over the budget → tighten the rows by the excess and solve again; far below it → loosen them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..capture.local import Decisions
from .decode import Choice, decisions_from, read_choice
from .memory import MIB, Memory, add_memory, set_budget
from .milp import Model, Progress, Solution
from .problem import Problem
from .recipes import Restriction
from .recompute import Recompute, add_recompute
from .sharding import Sharding, add_sharding
from .simulate import Simulation

Simulate = Callable[[Decisions], Simulation]
GAP = 1e-3
MAX_CORRECTIONS = 5
UNBOUNDED = 2**60
CLOSE = 0.03
"""A plan whose peak is within this share of the budget is not looked at again."""


@dataclass
class Answer:
    """A solved problem: what was chosen, what it costs by the model, and what the simulation says it holds."""

    choice: Choice
    decisions: Decisions
    simulation: Simulation
    status: str
    gap: float | None
    objective_s: float
    solve_s: float
    notes: list[str] = field(default_factory=list)


@dataclass
class Infeasible:
    """No answer within the budget: what binds, and the least that would do."""

    binding: tuple[str, ...]
    smallest: Answer | None


@dataclass(eq=False)
class Settings:
    """What a solve is given besides the problem."""

    budget_bytes: int | None
    time_limit_s: float = 30.0
    restriction: Restriction = field(default_factory=Restriction)
    progress: Progress | None = None


class Solver:
    """Solves one problem under different budgets and restrictions; builds each model once."""

    def __init__(self, problem: Problem, simulate: Simulate) -> None:
        self.problem, self.simulate = problem, simulate
        self._plain: tuple[Model, Sharding] | None = None
        self._full: tuple[Model, Sharding, Recompute, Memory] | None = None

    def solve(self, settings: Settings) -> Answer | Infeasible:
        """Return the fastest answer whose simulated peak is within the budget."""
        began = time.perf_counter()
        answer = self.without_memory(settings)
        if answer is None:
            return Infeasible(("the restrictions contradict one another",), None)
        if settings.restriction.fates:
            budget = settings.budget_bytes if settings.budget_bytes is not None else UNBOUNDED
            return self._within(settings, budget)
        budget = settings.budget_bytes
        if budget is None or answer.simulation.peak_bytes <= budget:
            return answer
        if not settings.restriction.recompute:
            return Infeasible((f"the peak, {answer.simulation.peak_at}",), answer)
        found = self._within(settings, budget)
        if isinstance(found, Answer):
            found.solve_s = time.perf_counter() - began
        return found

    def lower_bound_s(self) -> float:
        """Return seconds that no answer on this mesh can beat, whatever the budget."""
        model, _ = self.plain()
        return model.solve(relaxed=True).objective

    # Without memory

    def plain(self) -> tuple[Model, Sharding]:
        """Return the model of the sharding alone."""
        if self._plain is None:
            model = Model()
            self._plain = (model, add_sharding(model, self.problem))
        return self._plain

    def without_memory(self, settings: Settings) -> Answer | None:
        """Return the fastest answer that keeps everything, whatever it holds."""
        model, sharding = self.plain()
        solution = solve_in_stages(model, sharding, settings)
        if solution.values is None:
            return None
        return self._answer(solution, read_choice(solution.values, sharding, None))

    def _answer(self, solution: Solution, choice: Choice) -> Answer:
        decisions = decisions_from(self.problem, choice)
        simulation = self.simulate(decisions)
        gap = solution.gap if math.isfinite(solution.gap) else None
        return Answer(choice, decisions, simulation, solution.status, gap, solution.objective, solution.solve_s)

    # Within a budget

    def full(self) -> tuple[Model, Sharding, Recompute, Memory]:
        """Return the model of both halves with the memory rows."""
        if self._full is None:
            model = Model()
            sharding = add_sharding(model, self.problem)
            recompute = add_recompute(model, self.problem, sharding)
            memory = add_memory(model, self.problem, sharding, recompute, math.inf)
            self._full = (model, sharding, recompute, memory)
        return self._full

    def _within(self, settings: Settings, budget: int) -> Answer | Infeasible:
        """Solve, simulate, and move the rows' budget until the simulated peak is within the true one."""
        model, sharding, recompute, memory = self.full()
        deadline = time.perf_counter() + settings.time_limit_s
        search = _Search(budget)
        for _ in range(MAX_CORRECTIONS + 1):
            set_budget(model, memory, search.aim)
            remaining = max(1.0, deadline - time.perf_counter())
            solution = solve_in_stages(model, sharding, settings, remaining, recompute=recompute)
            if solution.values is not None:
                search.note(self._answer(solution, read_choice(solution.values, sharding, recompute)))
            elif search.low is not None:
                break
            else:
                smallest = self.smallest(settings)
                if smallest is None or smallest.simulation.peak_bytes > budget:
                    return Infeasible(self._binding(smallest), smallest)
                # The rows were too careful: what they say of this answer may stand, and what it leaves of the budget.
                search.aim = self._row_peak
                search.note(smallest)
            if search.done or time.perf_counter() > deadline:
                break
        if search.best is None:
            smallest = self.smallest(settings)
            if smallest is None or smallest.simulation.peak_bytes > budget:
                return Infeasible(self._binding(smallest), smallest)
            return smallest
        return search.best

    def smallest(self, settings: Settings) -> Answer | None:
        """Return the answer that holds least by the rows."""
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, math.inf)
        limit = min(10.0, settings.time_limit_s)
        least = {memory.peak: 1.0}
        solution = solve_in_stages(model, sharding, settings, limit, least, 5e-3, recompute)
        if solution.values is None:
            return None
        self._row_peak = (solution.values[memory.peak] + memory.static_mib) * MIB
        self._binding_rows = _tight_rows(model, memory, solution.values)
        set_budget(model, memory, self._row_peak * 1.0001 + 1024)
        fastest = solve_in_stages(model, sharding, settings, limit, recompute=recompute)
        chosen = fastest if fastest.values is not None else solution
        assert chosen.values is not None
        answer = self._answer(chosen, read_choice(chosen.values, sharding, recompute))
        answer.objective_s = float(np.dot(model.cost, chosen.values))
        return answer

    _row_peak = 0.0
    _binding_rows: tuple[str, ...] = ()

    def _binding(self, smallest: Answer | None) -> tuple[str, ...]:
        if smallest is None:
            return ("the restrictions contradict one another",)
        return self._binding_rows


class _Search:
    """Looks for the rows' budget whose answer just fits the true one, by what the simulations say."""

    def __init__(self, budget: int) -> None:
        self.budget, self.aim = budget, float(budget)
        self.low: float | None = None
        """The largest aim whose answer fitted."""
        self.high: float | None = None
        """The smallest aim whose answer did not."""
        self.best: Answer | None = None
        self.done = False

    def note(self, answer: Answer) -> None:
        """Take in the answer to the present aim, and move on."""
        left = self.budget - answer.simulation.peak_bytes
        if left >= 0:
            self.low = self.aim
            if self.best is None or answer.objective_s < self.best.objective_s:
                self.best = answer
            self.done = left <= CLOSE * self.budget or self.budget == UNBOUNDED
            self.aim += 0.9 * left
        else:
            self.high = self.aim
            self.aim += 1.02 * left - 0.001 * self.budget
        if self.low is not None and self.high is not None:
            self.done |= self.high - self.low < 0.2 * CLOSE * self.budget
            if not self.low < self.aim < self.high:
                self.aim = (self.low + self.high) / 2


def _forbidden(sharding: Sharding, restriction: Restriction) -> dict[int, float]:
    """The columns of what is not allowed, held at zero."""
    fixed: dict[int, float] = {}
    for decision, options in restriction.allowed.items():
        for option, column in enumerate(sharding.choice[decision]):
            if option not in options:
                fixed[column] = 0.0
    if restriction.forbids is not None:
        for (use, native, want), column in sharding.flow.items():
            if restriction.forbids(use, native, want):
                fixed[column] = 0.0
    return fixed


def solve_in_stages(
    model: Model,
    sharding: Sharding,
    settings: Settings,
    time_limit_s: float | None = None,
    cost: Mapping[int, float] | None = None,
    gap: float = GAP,
    recompute: Recompute | None = None,
) -> Solution:
    """LP → sharding by argmax → MIP for the rest → MIP of everything, started from that."""
    fixed = _forbidden(sharding, settings.restriction) | _fates(recompute, settings.restriction)
    limit = settings.time_limit_s if time_limit_s is None else time_limit_s
    began = time.perf_counter()
    relaxed = model.solve(relaxed=True, fixed=fixed, cost=cost, time_limit_s=limit)
    if relaxed.values is None:
        return relaxed
    held = dict(fixed)
    for columns in sharding.choice.values():
        best = max(columns, key=lambda column: relaxed.values[column])
        held.update({column: float(column == best) for column in columns})
    first = model.solve(fixed=held, cost=cost, time_limit_s=limit / 2, gap=gap)
    if first.values is not None and first.objective <= relaxed.objective * (1 + gap) + 1e-12:
        return Solution("optimal", first.values, first.objective, relaxed.objective, time.perf_counter() - began)
    remaining = max(1.0, limit - (time.perf_counter() - began))
    whole = model.solve(
        fixed=fixed, cost=cost, start=first.values, time_limit_s=remaining, gap=gap, progress=settings.progress
    )
    chosen = whole if whole.values is not None else first
    bound = max(whole.bound if math.isfinite(whole.bound) else -math.inf, relaxed.objective)
    return Solution(
        chosen.status if chosen is whole else "feasible",
        chosen.values,
        chosen.objective,
        bound,
        time.perf_counter() - began,
    )


def _fates(recompute: Recompute | None, restriction: Restriction) -> dict[int, float]:
    """The columns that pinned groups may not use: reruns of what is kept, keeping what is recomputed."""
    fixed: dict[int, float] = {}
    if recompute is None or not restriction.fates:
        return fixed
    for (decision, _), column in recompute.rerun.items():
        if restriction.fates.get(decision) is False:
            fixed[column] = 0.0
    for (decision, _), column in recompute.keep_inner.items():
        if restriction.fates.get(decision) is True:
            fixed[column] = 0.0
    for (stored, _), column in recompute.keep.items():
        free = not stored.boundary and not stored.held
        if free and restriction.fates.get(stored.source.decision) is True:
            fixed[column] = 0.0
    return fixed


def _tight_rows(model: Model, memory: Memory, values: np.ndarray) -> tuple[str, ...]:
    """The names of the rows that reach the peak, the fullest first."""
    loads = {
        row: sum(coefficient * values[column] for column, coefficient in terms) for row, terms in memory.rows.items()
    }
    peak = max(loads.values(), default=0.0)
    near = sorted((row for row, load in loads.items() if load >= 0.995 * peak), key=lambda row: -loads[row])
    return tuple(dict.fromkeys(model.row_names[row] for row in near))[:3]
