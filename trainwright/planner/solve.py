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
from .problem import Decision, Problem
from .recompute import Recompute, add_recompute
from .sharding import Sharding, add_sharding
from .simulate import Simulation

Simulate = Callable[[Decisions], Simulation]
Allowed = Mapping[Decision, frozenset[int]]
"""The options that a decision is left with; one that is missing keeps all."""
GAP = 1e-3
MAX_CORRECTIONS = 5


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
    recompute: bool = True
    progress: Progress | None = None
    allowed: Allowed = field(default_factory=dict)
    kept: Mapping[str, bool] = field(default_factory=dict)


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
        budget = settings.budget_bytes
        if budget is None or answer.simulation.peak_bytes <= budget:
            return answer
        if not settings.recompute:
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
        solution = _solve_in_stages(model, sharding, settings, _forbidden(sharding, settings.allowed))
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
        fixed = _forbidden(sharding, settings.allowed)
        deadline = time.perf_counter() + settings.time_limit_s
        aim, best, proven = float(budget), None, 0
        for attempt in range(MAX_CORRECTIONS + 1):
            set_budget(model, memory, aim)
            remaining = max(1.0, deadline - time.perf_counter())
            solution = _solve_in_stages(model, sharding, settings, fixed, remaining)
            if solution.values is None:
                if best is not None:
                    break
                if attempt == 0:
                    smallest = self.smallest(settings)
                    if smallest is not None and smallest.simulation.peak_bytes <= budget:
                        best = smallest
                        aim = self._loosened(smallest, budget)
                        continue
                    return Infeasible(self._binding(smallest), smallest)
                break
            answer = self._answer(solution, read_choice(solution.values, sharding, recompute))
            peak = answer.simulation.peak_bytes
            if peak <= budget:
                if best is None or answer.objective_s < best.objective_s:
                    best = answer
                if peak >= 0.97 * budget or proven >= 2 or time.perf_counter() > deadline:
                    break
                proven += 1
                aim += 0.9 * (budget - peak)
            else:
                if best is not None and proven:
                    break
                aim -= 1.02 * (peak - budget) + 0.001 * budget
        if best is not None:
            return best
        smallest = self.smallest(settings)
        if smallest is not None and smallest.simulation.peak_bytes <= budget:
            return smallest
        return Infeasible(self._binding(smallest), smallest)

    def _loosened(self, smallest: Answer, budget: int) -> float:
        """The rows were too careful: what they say of the smallest answer, and what it really leaves of the budget."""
        return self._row_peak + (budget - smallest.simulation.peak_bytes)

    def smallest(self, settings: Settings) -> Answer | None:
        """Return the answer that holds least by the rows."""
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, math.inf)
        fixed = _forbidden(sharding, settings.allowed)
        least = {memory.peak: 1.0}
        solution = _solve_in_stages(model, sharding, settings, fixed, min(10.0, settings.time_limit_s), least, 5e-3)
        if solution.values is None:
            return None
        self._row_peak = (solution.values[memory.peak] + memory.static_mib) * MIB
        self._binding_rows = _tight_rows(model, memory, solution.values)
        set_budget(model, memory, self._row_peak * 1.0001 + 1024)
        fastest = _solve_in_stages(model, sharding, settings, fixed, min(10.0, settings.time_limit_s))
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


def _forbidden(sharding: Sharding, allowed: Allowed) -> dict[int, float]:
    """The columns of the options that are not allowed, held at zero."""
    fixed: dict[int, float] = {}
    for decision, options in allowed.items():
        for option, column in enumerate(sharding.choice[decision]):
            if option not in options:
                fixed[column] = 0.0
    return fixed


def _solve_in_stages(
    model: Model,
    sharding: Sharding,
    settings: Settings,
    fixed: Mapping[int, float],
    time_limit_s: float | None = None,
    cost: Mapping[int, float] | None = None,
    gap: float = GAP,
) -> Solution:
    """LP → sharding by argmax → MIP for the rest → MIP of everything, started from that."""
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
    return Solution(chosen.status if chosen is whole else "feasible", chosen.values, chosen.objective, bound, time.perf_counter() - began)


def _tight_rows(model: Model, memory: Memory, values: np.ndarray) -> tuple[str, ...]:
    """The names of the rows that reach the peak, the fullest first."""
    loads = {row: sum(coefficient * values[column] for column, coefficient in terms) for row, terms in memory.rows.items()}
    peak = max(loads.values(), default=0.0)
    near = sorted((row for row, load in loads.items() if load >= 0.995 * peak), key=lambda row: -loads[row])
    return tuple(dict.fromkeys(model.row_names[row] for row in near))[:3]
