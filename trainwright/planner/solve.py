"""Solving one problem: the sharding alone, then both halves under the budget, and a simulation that has the last word.

1. without memory rows. If the simulated peak of that answer fits, it is the optimum; where the rows see it far above the
   budget, it is not even simulated.
2. with them: the relaxation, then branch and bound on the sharding (`stages`, `branching`).
3. simulate; over the budget → tighten the rows by the excess and solve again; far below it → loosen them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..capture.local import Decisions
from ..capture.schedule import Overlap, wider
from .aim import UNBOUNDED, Search
from .decode import Choice, decisions_from, read_choice
from .memory import Memory, add_memory, set_budget
from .milp import MIB, Model, Patience, Progress, Solution
from .offload import add_offload
from .problem import Decision, Problem
from .recipes import Restriction, restriction
from .recompute import Recompute, add_recompute
from .sharding import FEW_AXES, Sharding, add_sharding
from .simulate import Simulation
from .stages import CUT_OFF, FEW_COLUMNS, PATIENCE_ON_MANY_AXES, Stages, held_at, solve_in_stages

Simulate = Callable[[Decisions], Simulation]
Allowed = Mapping[Decision, frozenset[int]]
Starts = Callable[[], Sequence[Mapping[Decision, int]]]
MAX_CORRECTIONS = 5
SHARES = (1.0, 0.5, 0.25)
"""Of the budget, what a sharding that is chosen first may take at rest."""
MANY_OPS = 400
"""Simulating a program of so many takes long enough to be saved where it can."""
FAR = 1.1
"""What the rows see so many times above the budget is not simulated: should they be wrong, the aim moves."""
TIME_WEIGHT = 0.04
"""What seconds count beside bytes where the least memory is looked for: without, most columns cost nothing and the
relaxation's vertices are many."""


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

    def overlapped(self, simulate: Simulate, budget_bytes: int | None, furthest: Overlap) -> Answer:
        """Return the answer with its parameters travelling as far ahead as the budget allows (`capture.schedule`)."""
        for overlap in wider(furthest):
            if overlap == self.decisions.overlap:
                break
            decisions = replace(self.decisions, overlap=overlap)
            simulation = simulate(decisions)
            if budget_bytes is None or simulation.peak_bytes <= budget_bytes:
                return replace(self, decisions=decisions, simulation=simulation)
        return self


@dataclass
class Infeasible:
    """No answer within the budget: what binds, and the least that would do."""

    binding: tuple[str, ...]
    smallest: Answer | None
    cut_off: bool = False
    """Not asked further: whatever there is, another mesh has a faster one."""


@dataclass(eq=False)
class Settings:
    """What a solve is given besides the problem."""

    budget_bytes: int | None
    time_limit_s: float = 30.0
    restriction: Restriction = field(default_factory=Restriction)
    progress: Progress | None = None
    cutoff_s: float = math.inf
    """An answer that takes as long as this is not wanted: another mesh has one."""

    def stages(
        self,
        model: Model,
        sharding: Sharding,
        recompute: Recompute | None = None,
        starts: Starts | None = None,
        time_limit_s: float | None = None,
    ) -> Stages:
        """Return what `solve_in_stages` takes."""
        limit = self.time_limit_s if time_limit_s is None else time_limit_s
        return Stages(model, sharding, self.restriction, recompute, starts, self.progress, limit)


class Solver:
    """Solves one problem under different budgets and restrictions; builds each model once."""

    def __init__(self, problem: Problem, simulate: Simulate) -> None:
        self.problem, self.simulate = problem, simulate
        self._plain: tuple[Model, Sharding] | None = None
        self._full: tuple[Model, Sharding, Recompute, Memory] | None = None
        self._rest: tuple[Model, Sharding, int] | None = None
        self._known: tuple[tuple[Restriction, int | None], list[Mapping[Decision, int]]] | None = None

    def solve(self, settings: Settings) -> Answer | Infeasible:
        """Return the fastest answer whose simulated peak is within the budget."""
        began = time.perf_counter()
        self._floor_s, self.last_aim = 0.0, None
        fastest = self.without_memory(settings)
        if fastest is None and settings.restriction.forbids is not None:
            settings = replace(settings, restriction=_loosened(settings.restriction))
            fastest = self.without_memory(settings)
        if fastest is None:
            return Infeasible(("the restrictions contradict one another",), None)
        found = self._under_budget(fastest, settings)
        if isinstance(found, Answer):
            found.notes = settings.restriction.notes
            found.solve_s = time.perf_counter() - began
        return found

    def _under_budget(self, fastest: Solution, settings: Settings) -> Answer | Infeasible:
        """Take the fastest answer, which no memory row has seen, if it fits; or look for one that does."""
        if settings.restriction.fates:
            return self.within(settings, UNBOUNDED if settings.budget_bytes is None else settings.budget_bytes)
        budget = settings.budget_bytes
        self._floor_s = min(fastest.bound, fastest.objective)
        choice = read_choice(_values_of(fastest), self.plain()[1], None)
        simulated = functools.cache(lambda: self._answer(fastest, choice))
        if budget is None or not settings.restriction.recompute:
            answer = simulated()
            fits = budget is None or answer.simulation.peak_bytes <= budget
            return answer if fits else Infeasible((f"the peak, {answer.simulation.peak_at}",), answer)
        rows_peak = self._rows_peak(choice)
        if rows_peak > FAR * budget and len(self.problem.program.ops) > MANY_OPS:
            return self.within(settings, budget, wider=lambda: self._first_aim(rows_peak, simulated(), budget))
        answer = simulated()
        if answer.simulation.peak_bytes <= budget:
            return answer
        return self.within(settings, budget, self._first_aim(rows_peak, answer, budget))

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

    def without_memory(self, settings: Settings) -> Solution | None:
        """Return the fastest solution that keeps everything, whatever it holds."""
        model, sharding = self.plain()
        solution = solve_in_stages(settings.stages(model, sharding))
        return None if solution.values is None else solution

    def _answer(self, solution: Solution, choice: Choice) -> Answer:
        decisions = decisions_from(self.problem, choice)
        simulation = self.simulate(decisions)
        gap = min(solution.gap, 1 - self._floor_s / solution.objective if solution.objective > 0 else math.inf)
        return Answer(choice, decisions, simulation, solution.status, gap, solution.objective, solution.solve_s)

    # Within a budget

    def full(self) -> tuple[Model, Sharding, Recompute, Memory]:
        """Return the model of both halves with the memory rows."""
        if self._full is None:
            model = Model()
            sharding = add_sharding(model, self.problem)
            recompute = add_recompute(model, self.problem, sharding)
            add_offload(model, self.problem, sharding, recompute)
            memory = add_memory(model, self.problem, sharding, recompute, math.inf)
            self._full = (model, sharding, recompute, memory)
        return self._full

    def _rows_peak(self, choice: Choice) -> float:
        """Return the bytes that the rows count of `choice` when everything is kept."""
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, math.inf)
        again = [*recompute.rerun.values(), *recompute.convert.values(), *recompute.leaves.values()]
        again += recompute.states.values()
        fixed = held_at(sharding, choice.options) | dict.fromkeys(again, 0.0)
        found = model.solve(relaxed=True, fixed=fixed, cost={memory.peak: 1.0})
        return 0.0 if found.values is None else self._peak_of_rows(found)

    @staticmethod
    def _first_aim(rows_peak: float, kept: Answer, budget: int) -> float:
        """Return the rows' budget to begin with: what they count too much of the answer that keeps everything is added."""
        return budget + max(0.0, rows_peak - kept.simulation.peak_bytes)

    def _peak_of_rows(self, found: Solution) -> float:
        _, _, _, memory = self.full()
        assert found.values is not None
        return (found.values[memory.peak] + memory.static_mib) * MIB

    def within(
        self, settings: Settings, budget: int, aim: float | None = None, wider: Callable[[], float] | None = None
    ) -> Answer | Infeasible:
        """Solve, simulate, and move the rows' budget until the simulated peak is within the true one.

        aim: the rows' budget to begin with; `wider` makes another, where there is nothing within that.
        """
        model, sharding, recompute, memory = self.full()
        deadline = time.perf_counter() + settings.time_limit_s
        search = Search(budget, aim)
        earlier: tuple[float, np.ndarray] | None = None
        for _ in range(MAX_CORRECTIONS + 1):
            set_budget(model, memory, search.aim)
            remaining = max(1.0, deadline - time.perf_counter())
            stages = settings.stages(model, sharding, recompute, self._starts_for(settings), remaining)
            stages.cutoff, stages.floor = settings.cutoff_s, self._floor_s
            if len(self.problem.mesh) > FEW_AXES:
                stages.patience = PATIENCE_ON_MANY_AXES
            if earlier is not None and earlier[0] <= search.aim:
                stages.earlier = earlier[1]
            solution = solve_in_stages(stages)
            if solution.values is not None:
                earlier = search.aim, solution.values
                search.note(self._answer(solution, read_choice(solution.values, sharding, recompute)))
            elif search.best is None and (solution.status == CUT_OFF or math.isfinite(settings.cutoff_s)):
                return Infeasible((CUT_OFF,), None, cut_off=True)
            elif search.low is not None:
                break
            elif wider is not None and (wide := wider()) > search.aim:
                search.aim, wider = wide, None
                continue
            else:
                smallest = self.smallest(settings)
                if smallest is None or smallest.simulation.peak_bytes > budget:
                    return Infeasible(self._binding(smallest), smallest)
                # The rows were too careful: what they say of this answer may stand, and what it leaves of the budget.
                search.aim = self._row_peak
                search.note(smallest)
            if search.done or time.perf_counter() > deadline:
                break
        self.last_aim = search.low
        if search.best is None and math.isfinite(settings.cutoff_s):
            return Infeasible((CUT_OFF,), None, cut_off=True)
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
        limit = min(15.0, settings.time_limit_s)
        stages = settings.stages(model, sharding, recompute, self._starts_for(settings), limit)
        stages.gap, stages.patience = 5e-3, Patience(1.0, 2e-2)
        stages.floor = -math.inf
        solution = solve_in_stages(stages, self._mostly_peak(settings.budget_bytes))
        if solution.values is None:
            return None
        self._row_peak = self._peak_of_rows(solution)
        self._binding_rows = _tight_rows(model, memory, solution.values)
        choice = read_choice(solution.values, sharding, recompute)
        # The same sharding, with no more recomputation than that budget asks for.
        set_budget(model, memory, self._row_peak * 1.0001 + 1024)
        only = {decision: frozenset([option]) for decision, option in choice.options.items()}
        same = replace(settings, restriction=replace(settings.restriction, allowed=only))
        fastest = solve_in_stages(same.stages(model, sharding, recompute, None, limit))
        if fastest.values is not None:
            return self._answer(fastest, read_choice(fastest.values, sharding, recompute))
        answer = self._answer(solution, choice)
        answer.objective_s = float(np.dot(model.cost, solution.values))
        return answer

    def _mostly_peak(self, budget: int | None) -> dict[int, float]:
        """The cost of what the rows hold at their peak, in MiB; in a large model, with a little of the seconds."""
        model, _, _, memory = self.full()
        cost = {memory.peak: 1.0}
        floor_s = self._floor_s or self.lower_bound_s()
        if model.num_columns > FEW_COLUMNS and floor_s > 0:
            scale = model.solve(relaxed=True, cost=cost).objective if budget is None else budget / MIB
            rate = TIME_WEIGHT * scale / floor_s
            cost.update({column: rate * seconds for column, seconds in enumerate(model.cost) if seconds})
        return cost

    def _starts_for(self, settings: Settings) -> Starts:
        return functools.cache(lambda: self.starts(settings))

    def starts(self, settings: Settings) -> list[Mapping[Decision, int]]:
        """Return shardings to begin from: the fastest ones of those that rest in a share of the budget, and of `fsdp`."""
        asked = settings.restriction, settings.budget_bytes
        if self._known is None or self._known[0] != asked:
            self._known = asked, self._starts(settings)
        return self._known[1]

    def _starts(self, settings: Settings) -> list[Mapping[Decision, int]]:
        sharded = restriction(self.problem, "fsdp").allowed
        params = {decision: options for decision, options in sharded.items() if decision.group is None}
        found: list[Mapping[Decision, int] | None] = []
        for extra in ({}, sharded, params):
            allowed = _both(settings.restriction.allowed, extra)
            if not all(allowed.values()):
                found.append(None)
            else:
                found.append(
                    self._fastest(replace(settings, restriction=replace(settings.restriction, allowed=allowed)))
                )
        if settings.budget_bytes is not None:
            found += [self.first_stage(settings, share * settings.budget_bytes, found[0]) for share in SHARES]
        return list({tuple(options.values()): options for options in found if options is not None}.values())

    def _fastest(self, settings: Settings) -> dict[Decision, int] | None:
        model, sharding = self.plain()
        solution = solve_in_stages(settings.stages(model, sharding))
        return None if solution.values is None else read_choice(solution.values, sharding, None).options

    def first_stage(
        self, settings: Settings, static_bytes: float, fastest: Mapping[Decision, int] | None = None
    ) -> Mapping[Decision, int] | None:
        """Return the fastest sharding whose parameters and optimizer states rest in `static_bytes`.

        fastest: that of any, where it is known: it may do.
        """
        if fastest is not None and self._at_rest(fastest) <= static_bytes:
            return fastest
        model, sharding, rest = self._plain_with_rest()
        model.row_upper[rest] = static_bytes / MIB
        solution = solve_in_stages(settings.stages(model, sharding))
        return None if solution.values is None else read_choice(solution.values, sharding, None).options

    def _at_rest(self, options: Mapping[Decision, int]) -> int:
        """Return the bytes of parameters and optimizer states under `options`."""
        return sum(
            decision.count * (decision.rest_bytes[options[decision]] + decision.state_bytes[options[decision]])
            for decision in self.problem.params
        )

    def _plain_with_rest(self) -> tuple[Model, Sharding, int]:
        """The model of the sharding alone, with a row of what rests in memory."""
        if self._rest is None:
            model = Model()
            sharding = add_sharding(model, self.problem)
            terms = [
                (column, decision.count * (decision.rest_bytes[option] + decision.state_bytes[option]) / MIB)
                for decision in self.problem.params
                for option, column in enumerate(sharding.choice[decision])
            ]
            self._rest = model, sharding, model.row("parameters at rest", terms)
        return self._rest

    last_aim: float | None = None
    """The rows' budget under which the last answer fitted the true one; None where it fitted without rows."""
    _floor_s = 0.0
    """What the sharding alone takes at least: a bound where the whole problem gives none."""
    _row_peak = 0.0
    _binding_rows: tuple[str, ...] = ()

    def _binding(self, smallest: Answer | None) -> tuple[str, ...]:
        if smallest is None:
            return ("the restrictions contradict one another",)
        return self._binding_rows


def _values_of(solution: Solution) -> np.ndarray:
    assert solution.values is not None
    return solution.values


def _both(first: Allowed, second: Allowed) -> dict[Decision, frozenset[int]]:
    """What two restrictions allow together."""
    merged = dict(first)
    for decision, options in second.items():
        merged[decision] = merged.get(decision, options) & options
    return merged


def _loosened(given: Restriction) -> Restriction:
    """The restriction with every change of layout allowed, and a note of it."""
    note = "the recipe's own changes of layout lead to no plan for this model; gathers and scatters are allowed"
    return replace(given, forbids=None, notes=[*given.notes, note])


def _tight_rows(model: Model, memory: Memory, values: np.ndarray) -> tuple[str, ...]:
    """The names of the rows that reach the peak, the fullest first."""
    loads = {
        row: sum(coefficient * values[column] for column, coefficient in terms) for row, terms in memory.rows.items()
    }
    peak = max(loads.values(), default=0.0)
    near = sorted((row for row, load in loads.items() if load >= 0.995 * peak), key=lambda row: -loads[row])
    return tuple(dict.fromkeys(model.row_names[row] for row in near))[:3]
