"""Solving one problem: the sharding alone, then both halves under the budget, and a simulation that has the last word.

1. Solve without memory rows. If the simulated peak of that answer fits, it is the optimum; where the rows count far more than the
   budget for it, it is not even simulated.
2. Solve with memory rows: the relaxation, then branch and bound on the sharding (`stages`, `branching`).
3. Simulate the answer. Where its peak exceeds the budget, tighten the row budget by the excess and solve again; where it is far
   below, loosen it (`fitting`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from ...program.decisions import Decisions, Overlap
from ...tiers import Policy
from ..model.deadline import Deadline
from ..model.decode import Choice, decisions_from, read_choice
from ..model.hidden import hide
from ..model.implied import bound_columns
from ..model.memory import Memory, add_memory, set_budget
from ..model.milp import MIB, Model, Solution
from ..model.offload import add_offload
from ..model.outcome import Outcome
from ..model.recompute import Recompute, add_recompute
from ..model.sharding import Sharding, add_sharding
from ..problem.problem import Decision, Problem
from ..problem.recipes import Restriction, restriction
from .aim import Search
from .answer import Answer, Infeasible, Least, Settings, Simulate, refused
from .effort import Effort
from .fitting import Fitting
from .stages import Options, Starts, held_at, relaxed_bound, solve_in_stages

Allowed = Mapping[Decision, frozenset[int]]

HELD_TO = 16
"""The bytes by which a row budget that is just met is widened: the solver holds rows, in MiB, to 1e-6."""


class Solver:
    """Solves one problem under different budgets and restrictions; builds each model once."""

    def __init__(
        self,
        problem: Problem,
        simulate: Simulate,
        travel: Overlap = "none",
        travel_within: Overlap = "none",
        delta: float | None = None,
    ) -> None:
        """`travel` says how parameters travel where no memory binds, `travel_within` where it does.

        Unless one by one, they share latencies. delta: what of them nothing hides, see `hidden`.
        """
        self.problem, self.simulate, self.delta = problem, simulate, delta
        self.travel, self.travel_within = travel, travel_within
        self.effort = Effort.of(problem)
        self._others: dict[Overlap, Solver] = {travel_within: self}
        self._plain: tuple[Model, Sharding] | None = None
        self._full: tuple[Model, Sharding, Recompute, Memory] | None = None
        self._rest: tuple[Model, Sharding, int] | None = None
        self._unbound: list[tuple[Restriction, Solution]] = []
        """The last restriction with its fastest solution without memory, of all ways in which parameters travel."""
        self._known: list[tuple[tuple[Restriction, int | None], list[Mapping[Decision, int]]]] = []
        """The last two restrictions and budgets with the shardings to begin from, of all ways too."""

    def travelling(self, within: Overlap) -> Solver:
        """Return a solver of the same problem whose parameters travel so within a budget."""
        if within not in self._others:
            other = Solver(self.problem, self.simulate, self.travel, within, self.delta)
            other._plain, other.effort = self.plain(), self.effort
            other._unbound, other._known = self._unbound, self._known
            self._others[within] = other
        return self._others[within]

    def exposing(self, delta: float) -> Solver:
        """Return a solver of the same problem, by whose objective less of what travels is hidden."""
        other = Solver(self.problem, self.simulate, self.travel, self.travel_within, delta)
        other.effort = self.effort
        return other

    def solve(self, settings: Settings) -> Answer | Infeasible:
        """Return the fastest answer whose simulated peak is within the budget."""
        began_s = settings.deadline.work_s
        fastest = self.without_memory(settings)
        if fastest.values is None and settings.restriction.forbids is not None:
            settings = replace(settings, restriction=_loosened(settings.restriction))
            fastest = self.without_memory(settings)
        if fastest.values is None:
            return refused(fastest.outcome)
        resting = self.problem.costs.resting if settings.restriction.offload else None
        all_kept = self._kept_if_it_fits(fastest, settings, resting)
        if all_kept is not None:
            found: Answer | Infeasible = all_kept
        elif settings.restriction.fates or resting is not None:
            # an objective without memory knows nothing of what pins make leave or rerun, nor of what disks move anyway
            settings = replace(settings, floor_s=0.0)
            budget = math.inf if settings.budget_bytes is None else settings.budget_bytes
            found = self.within(settings, budget)
        else:
            settings = replace(settings, floor_s=min(fastest.bound, fastest.objective))
            found = self._under_budget(fastest, settings)
        found.floor_s = settings.floor_s
        if isinstance(found, Answer):
            found.notes = settings.restriction.notes
            found.solve_s = settings.deadline.work_s - began_s
        return found

    def _kept_if_it_fits(self, fastest: Solution, settings: Settings, resting: Policy | None) -> Answer | None:
        """Return the answer that lets nothing rest on disks, if all may stay: they write what they do anyway, and read nothing."""
        if resting is None or resting.keep_bytes is not None or settings.restriction.fates:
            return None
        choice = read_choice(values_of(fastest), self.plain()[1], None)
        answer = self.answer(fastest, min(fastest.bound, fastest.objective), choice)
        fits = settings.budget_bytes is None or answer.simulation.peak_bytes <= settings.budget_bytes
        return answer if fits else None

    def _under_budget(self, fastest: Solution, settings: Settings) -> Answer | Infeasible:
        """Take the fastest answer, which no memory row has seen, if it fits; or look for one that does."""
        budget, floor_s = settings.budget_bytes, settings.floor_s
        if settings.progress is not None:
            settings.progress.proves(floor_s)
        choice = read_choice(values_of(fastest), self.plain()[1], None)
        kept = functools.cache(lambda: self.answer(fastest, floor_s, choice))
        if budget is None or not settings.restriction.recompute:
            return self._all_kept(self.answer(fastest, floor_s, choice, self.travel), settings)
        rows_peak = self._rows_peak(choice)
        may_fit = rows_peak <= self.effort.tries_below * budget
        if may_fit:
            answer = kept() if self.travel == self.travel_within else self.answer(fastest, floor_s, choice, self.travel)
            if answer.simulation.peak_bytes <= budget:
                return answer
        aim = max(budget, settings.row_budget)
        found = self.within(settings, budget, aim, lambda: self._wider_aim(rows_peak, kept(), budget))
        is_lost = isinstance(found, Infeasible) and found.outcome is not Outcome.SLOWER
        if may_fit and is_lost and kept().simulation.peak_bytes <= budget:
            return replace(kept(), row_budget=float(budget))
        return found

    def _all_kept(self, answer: Answer, settings: Settings) -> Answer | Infeasible:
        """Return an answer that keeps everything if it fits, else one that holds no copy from one region to another."""
        budget = settings.budget_bytes
        if budget is None or answer.simulation.peak_bytes <= budget:
            return answer
        one_by_one = answer.overlapped(self.simulate, budget, "none")
        if one_by_one.simulation.peak_bytes <= budget:
            return one_by_one
        if answer.decisions.shared:
            apart = replace(settings, restriction=replace(settings.restriction, share=False))
            slower = self.without_memory(apart)
            if slower.values is not None:
                choice = read_choice(slower.values, self.plain()[1], None)
                return self._all_kept(self.answer(slower, settings.floor_s, choice, "none"), apart)
        return Infeasible(Outcome.DOES_NOT_FIT, (f"the peak, {answer.simulation.peak_at}",), answer)

    def lower_bound_s(self) -> float:
        """Return seconds that no answer on this mesh can beat, whatever the budget."""
        return self.relaxed[0]

    @functools.cached_property
    def relaxed(self) -> tuple[float, float]:
        """The seconds of the relaxation without memory, and those of work that it took."""
        deadline = Deadline()
        return self.plain()[0].solve(relaxed=True, deadline=deadline).objective, deadline.work_s

    # Without memory

    def plain(self) -> tuple[Model, Sharding]:
        """Return the model of the sharding alone."""
        if self._plain is None:
            model = Model()
            self._plain = (model, add_sharding(model, self.problem, self.travel))
            hide(model, self.problem, self._plain[1], delta=self.delta)
            bound_columns(model)
        return self._plain

    def without_memory(self, settings: Settings) -> Solution:
        """Return the fastest solution that keeps everything, whatever it holds; `values` is None where none was found."""
        asked = settings.restriction
        known = next((solution for given, solution in self._unbound if given == asked), None)
        if known is None or known.outcome is Outcome.STOPPED:
            known = solve_in_stages(settings.stages(*self.plain()))
            self._unbound[:] = [(asked, known)]
        return known

    def keeping(self, options: Options, settings: Settings) -> tuple[Solution, Choice, Decisions] | None:
        """Return the fastest solution with one sharding that keeps everything, with what it says; None where none was found."""
        solution = solve_in_stages(settings.held_to(options).stages(*self.plain()))
        if solution.values is None:
            return None
        choice = read_choice(solution.values, self.plain()[1], None)
        return solution, choice, replace(decisions_from(self.problem, choice), overlap=self.travel)

    def answer(
        self, solution: Solution, floor_s: float, choice: Choice | None = None, travel: Overlap | None = None
    ) -> Answer:
        """Return what a solution says, simulated; `choice` is read from it where it is not given.

        floor_s: seconds that no answer beats. travel: how parameters travel, by default as they do within a budget.
        """
        if choice is None:
            _, sharding, recompute, _ = self.full()
            choice = read_choice(values_of(solution), sharding, recompute)
        decisions = replace(decisions_from(self.problem, choice), overlap=travel or self.travel_within)
        simulation = self.simulate(decisions)
        gap = min(solution.gap, 1 - floor_s / solution.objective if solution.objective > 0 else math.inf)
        return Answer(choice, decisions, simulation, gap, solution.objective)

    # Within a budget

    def full(self) -> tuple[Model, Sharding, Recompute, Memory]:
        """Return the model of both halves with the memory rows."""
        if self._full is None:
            model = Model()
            sharding = add_sharding(model, self.problem, self.travel_within)
            recompute = add_recompute(model, self.problem, sharding)
            hide(model, self.problem, sharding, recompute, self.delta)
            add_offload(model, self.problem, sharding, recompute)
            memory = add_memory(model, self.problem, sharding, recompute, math.inf)
            bound_columns(model)
            self._full = (model, sharding, recompute, memory)
        return self._full

    def _rows_peak(self, choice: Choice) -> float:
        """Return the bytes that the rows count of `choice` when everything is kept."""
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, math.inf)
        again = [*recompute.rerun.values(), *recompute.convert.values(), *recompute.leaves.values()]
        again += [*recompute.states.values(), *recompute.params.values()]
        fixed = held_at(sharding, choice.options) | dict.fromkeys(again, 0.0) | _shared_at(sharding, choice)
        found = model.solve(relaxed=True, fixed=fixed, cost={memory.peak: 1.0})
        return 0.0 if found.values is None else memory.peak_bytes(found.values)

    @property
    def is_small(self) -> bool:
        """True where the whole model is solved at once."""
        return self.full()[0].num_columns <= self.effort.few_columns

    @property
    def hides(self) -> bool:
        """True where the device computes while parameters are in flight."""
        return self.problem.costs.device.kind == "gpu"

    def aim_of(self, options: Options, budget: float) -> float:
        """Return the row budget of one sharding: the true one plus what the rows count too much when everything is kept."""
        choice = Choice(dict(options))
        kept = self.simulate(replace(decisions_from(self.problem, choice), overlap=self.travel_within))
        return budget + max(0.0, self._rows_peak(choice) - kept.peak_bytes)

    def _wider_aim(self, rows_peak: float, kept: Answer, budget: float) -> float:
        """Return a rows' budget that is too large by the share that they count too much of what keeps everything."""
        too_much = max(0.0, rows_peak - kept.simulation.peak_bytes)
        return budget + too_much * min(1.0, budget / kept.simulation.peak_bytes)

    def within(
        self, settings: Settings, budget: float, aim: float | None = None, wider: Callable[[], float] | None = None
    ) -> Answer | Infeasible:
        """Return the fastest answer whose simulated peak is within `budget`; see `fitting`.

        aim: the rows' budget to begin with; `wider` makes another, where there is nothing within that.
        """
        return Fitting(self, settings, budget, aim, wider).run()

    def bound_within_s(self, settings: Settings) -> float:
        """Return seconds that no answer beats which the rows let into the budget, by the relaxation alone."""
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, math.inf if settings.budget_bytes is None else settings.budget_bytes)
        return relaxed_bound(settings.stages(model, sharding, recompute))

    def lets_nothing_into(self, budget: float, settings: Settings) -> bool:
        """Return true where the relaxation proves that no plan is within a budget by the rows."""
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, budget)
        return relaxed_bound(settings.stages(model, sharding, recompute), cost={}) == math.inf

    def smallest(self, settings: Settings) -> Answer | None:
        """Return the answer that holds least by the rows."""
        least = self.least(settings)
        return least.answer if isinstance(least, Least) else None

    def least(self, settings: Settings) -> Least | Outcome:
        """Return the answer that holds least by the rows, or why there is none.

        Where that one does not fit, a known sharding may: the rows are more careful of some shardings than of others. Where none
        fits, what is returned hangs on no budget, so it is found again under the one that a refusal names.
        """
        found = self._least_by_rows(settings)
        budget = settings.budget_bytes
        if isinstance(found, Outcome) or budget is None or found.answer.simulation.peak_bytes <= budget:
            return found
        if found.slower is not None and found.slower.simulation.peak_bytes < found.answer.simulation.peak_bytes:
            found = replace(found, answer=found.slower)
            if found.answer.simulation.peak_bytes <= budget:
                return found
        least = self._smaller(found, self.starts(replace(settings, budget_bytes=None)), settings)
        if least.answer.simulation.peak_bytes > budget:
            of_budget = self._smaller(least, self.starts(settings), settings)
            if of_budget.answer.simulation.peak_bytes <= budget:
                return of_budget
        return least

    def keeping_more(self, least: Least, budget: float, settings: Settings) -> Least:
        """Return what holds least, and fits, with less recomputed, as far as the budget allows with the same sharding."""
        search = Search(budget, self.effort, least.rows_peak)
        search.note(least.answer)
        for _ in range(self.effort.refits_of_least):
            if search.is_narrow:
                break
            fastest = self._with_sharding(least.answer.choice.options, search.aim, settings)
            if fastest.values is not None:
                search.note(self._of_one_sharding(fastest, settings), self.full()[3].peak_bytes(fastest.values))
            elif not search.note_nothing():
                break
        return replace(least, answer=search.best or least.answer)

    def _with_sharding(self, options: Options, row_budget: float, settings: Settings) -> Solution:
        """Return the fastest solution with one sharding; its end does not hang on the solves before."""
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, row_budget)
        limit = min(self.effort.longest_least_s, settings.time_limit_s)
        same = replace(settings.held_to(options), deadline=settings.deadline.afresh(limit))
        return solve_in_stages(same.stages(model, sharding, recompute, None, limit))

    def _of_one_sharding(self, fastest: Solution, settings: Settings) -> Answer:
        """Return an answer that is proven for its sharding alone."""
        _, sharding, recompute, _ = self.full()
        choice = read_choice(values_of(fastest), sharding, recompute)
        return self.answer(replace(fastest, bound=settings.floor_s), settings.floor_s, choice)

    def _smaller(self, least: Least, known: Iterable[Options], settings: Settings) -> Least:
        """Return the smallest of an answer and those with known shardings, with what is proven of all."""
        each = [least]
        for options in known:
            found = self._least_by_rows(replace(settings.held_to(options), budget_bytes=None))
            each += [found] if isinstance(found, Least) else []
        smallest = min(each, key=lambda least: least.answer.simulation.peak_bytes)
        return replace(smallest, rows_bound=least.rows_bound)

    def _least_by_rows(self, settings: Settings) -> Least | Outcome:
        model, sharding, recompute, memory = self.full()
        set_budget(model, memory, math.inf)
        limit = min(self.effort.longest_least_s, settings.time_limit_s)
        budget = settings.budget_bytes
        # the smallest plan that one question names is found again by the next, whatever that asks for and solves before
        settings = replace(settings, budget_bytes=None, deadline=settings.deadline.afresh(limit))
        stages = settings.stages(model, sharding, recompute, self.starts_for(settings), limit)
        stages.gap, stages.patience = self.effort.gap_of_least, self.effort.patience_for_least
        solution = solve_in_stages(stages, self._mostly_peak(settings))
        if solution.values is None:
            return solution.outcome
        rows_peak = memory.peak_bytes(solution.values)
        binding = _tight_rows(model, memory, solution.values)
        choice = read_choice(solution.values, sharding, recompute)
        # The same sharding, with no more recomputation than that budget asks for.
        fastest = self._with_sharding(choice.options, rows_peak * 1.0001 + HELD_TO, settings)
        answer = None if fastest.values is None else self._of_one_sharding(fastest, settings)
        slower = None
        if answer is None or (budget is not None and answer.simulation.peak_bytes > budget):
            hidden = sharding.hidden
            in_full_s = (lambda values: float(np.dot(model.cost, values))) if hidden is None else hidden.in_full_s
            found = replace(solution, bound=-math.inf, objective=in_full_s(solution.values))
            slower = self.answer(found, settings.floor_s, choice)
        bound = rows_peak * (1 - min(1.0, solution.gap))
        least = slower if answer is None else answer
        assert least is not None
        return Least(least, rows_peak, bound, binding, slower)

    def _mostly_peak(self, settings: Settings) -> dict[int, float]:
        """Return the cost of what the rows hold at their peak, in MiB; in a large model, with a little of the seconds.

        It is the same for every budget: so the smallest plan that one question names is found again by the next.
        """
        model, _, _, memory = self.full()
        cost, floor_s = {memory.peak: 1.0}, self.lower_bound_s()
        if model.num_columns > self.effort.few_columns and floor_s > 0:
            rate = self.effort.kept_bytes_weight * self.kept_bytes(settings) / MIB / floor_s
            cost.update({column: rate * seconds for column, seconds in enumerate(model.cost) if seconds})
        return cost

    def kept_bytes(self, settings: Settings) -> float:
        """Return what the rows count of the fastest sharding when everything is kept."""
        fastest = self.without_memory(settings)
        return 0.0 if fastest.values is None else self._rows_peak(read_choice(fastest.values, self.plain()[1], None))

    def starts_for(self, settings: Settings) -> Starts:
        return functools.cache(lambda: self.starts(settings))

    def starts(self, settings: Settings) -> list[Mapping[Decision, int]]:
        """Return shardings to begin from: the fastest ones of those that rest in a share of the budget, and of `fsdp`."""
        asked = settings.restriction, settings.budget_bytes
        for known, starts in self._known:
            if known == asked:
                return starts
        self._known[:] = [*self._known[-1:], (asked, self._starts(settings))]
        return self._known[-1][1]

    def _starts(self, settings: Settings) -> list[Mapping[Decision, int]]:
        sharded = restriction(self.problem, "fsdp").allowed
        params = {decision: options for decision, options in sharded.items() if decision.group is None}
        found: list[Mapping[Decision, int] | None] = [self._options_of(self.without_memory(settings))]
        found += [self._fastest(settings, extra) for extra in (sharded, params)]
        if settings.budget_bytes is not None:
            shares = self.effort.rest_shares
            found += [self.first_stage(settings, share * settings.budget_bytes, found[0]) for share in shares]
        return _different(found)

    def of_recipes(self, settings: Settings) -> list[Mapping[Decision, int]]:
        """Return the shardings that are fastest where nothing has to fit: of all, and of what each recipe leaves to choose."""
        wanted = [restriction(self.problem, recipe).allowed for recipe in ("ddp", "megatron")]
        known = self.starts(replace(settings, budget_bytes=None))
        # in a larger program the row of what rests makes one of these solves longer than the search
        first = self.first_stages(settings) if self.problem.is_quick and settings.budget_bytes is not None else []
        return _different([*known, *(self._fastest(settings, each) for each in wanted), *first])

    def _fastest(self, settings: Settings, extra: Allowed) -> dict[Decision, int] | None:
        """Return the fastest sharding that keeps everything, of those that `extra` allows too."""
        allowed = both(settings.restriction.allowed, extra)
        if not all(allowed.values()):
            return None
        narrow = replace(settings, restriction=replace(settings.restriction, allowed=allowed))
        limit = settings.time_limit_s * self.effort.start_share
        return self._options_of(solve_in_stages(narrow.stages(*self.plain(), time_limit_s=limit)))

    def _options_of(self, solution: Solution) -> dict[Decision, int] | None:
        """Return the sharding of a solution without memory."""
        return None if solution.values is None else read_choice(solution.values, self.plain()[1], None).options

    def first_stages(self, settings: Settings) -> list[Mapping[Decision, int]]:
        """Return the fastest sharding whose parameters and optimizer states rest in a share of the budget, for each share.

        The first is the fastest of all, if it rests in the budget: as parameters travel where no memory binds.
        """
        budget = settings.budget_bytes
        assert budget is not None
        fastest = self._options_of(self.without_memory(settings))
        fits = fastest is not None and self._at_rest(fastest) <= budget
        in_shares = (self.first_stage(settings, share * budget) for share in self.effort.rest_shares)
        return _different([fastest if fits else None, *in_shares])

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
        return sum(decision.resting_bytes(options[decision]) for decision in self.problem.params)

    def _plain_with_rest(self) -> tuple[Model, Sharding, int]:
        """Return the model of the sharding alone, with a row of what rests in memory."""
        if self._rest is None:
            model = Model()
            sharding = add_sharding(model, self.problem, self.travel_within)
            terms = [
                (column, decision.resting_bytes(option) / MIB)
                for decision in self.problem.params
                for option, column in enumerate(sharding.choice[decision])
            ]
            hide(model, self.problem, sharding, delta=self.delta)
            bound_columns(model)
            self._rest = model, sharding, model.row("parameters at rest", terms)
        return self._rest


def values_of(solution: Solution) -> np.ndarray:
    assert solution.values is not None
    return solution.values


def both(first: Allowed, second: Allowed) -> dict[Decision, frozenset[int]]:
    """Return what two restrictions allow together."""
    merged = dict(first)
    for decision, options in second.items():
        merged[decision] = merged.get(decision, options) & options
    return merged


def _different(found: Iterable[Options | None]) -> list[Options]:
    return list({tuple(options.values()): options for options in found if options is not None}.values())


def _shared_at(sharding: Sharding, choice: Choice) -> dict[int, float]:
    """Return the columns that say whether one gathered copy serves several regions, with their values under `choice`."""
    return {
        column: float((source, want) in choice.shared and source.natives[choice.options[source.decision]] == native)
        for (source, native, want), column in sharding.shared.items()
        if native != want[0]
    }


def _loosened(given: Restriction) -> Restriction:
    """Return the restriction with every change of layout allowed, and a note of it."""
    note = "the recipe's own changes of layout lead to no plan for this model; gathers and scatters are allowed"
    return replace(given, forbids=None, notes=[*given.notes, note])


def _tight_rows(model: Model, memory: Memory, values: np.ndarray) -> tuple[str, ...]:
    """Return the names of the rows that reach the peak, the fullest first."""
    loads = memory.loads(values)
    peak = max(loads.values(), default=0.0)
    near = sorted((row for row, load in loads.items() if load >= 0.995 * peak), key=lambda row: -loads[row])
    return tuple(dict.fromkeys(model.row_names[row] for row in near))[:3]
