"""Finding the fastest answer whose simulated peak is within a budget: solve, simulate, move the rows' budget, solve again.

The rows differ a little from the simulation, for some shardings more than for others, so no one row budget is right for all:
one that admits a sharding which fits also admits another which does not. A sharding whose answer does not fit, or leaves much
of the budget, is therefore fitted by itself too: the sharding is held, and only what is kept is chosen anew, under a row budget
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..model.deadline import Deadline
from ..model.memory import set_budget
from ..model.milp import Solution
from ..model.outcome import Outcome
from .aim import Search
from .answer import Answer, Infeasible, Settings, refused
from .effort import CLOSE, GAP, NEAR
from .stages import Options, forbid, solve_beside, solve_in_stages

if TYPE_CHECKING:
    from .solve import Least, Solver


class Fitting:
    """One search; `aim` is the rows' budget to begin with, `wider` makes another where nothing is within that."""

    def __init__(
        self,
        solver: Solver,
        settings: Settings,
        budget: float,
        aim: float | None = None,
        wider: Callable[[], float] | None = None,
    ) -> None:
        self.solver, self.settings, self.budget, self.wider = solver, settings, budget, wider
        self.effort = solver.effort
        self.search = Search(budget, self.effort, aim, settings.progress)
        self._deadline = settings.deadline.part(settings.time_limit_s)
        self._earlier: tuple[float, np.ndarray] | None = None
        self._least: Least | None = None
        """The smallest plan by the rows, where it did not fit and plans that are a little larger by the rows were looked at."""
        self._least_rows_bytes = -math.inf
        """What no plan is below by the rows, as far as it is proven."""
        self._held: set[tuple[int, ...]] = set()
        self._fitted: dict[tuple[int, ...], Options] = {}
        """Those of them of which no row budget is left to try."""
        self._forbidden: set[tuple[int, ...]] = set()
        self._proofs: dict[float, float] = {}
        """The rows' budgets under which the whole space was solved, each with the bound that this proved."""

    def run(self) -> Answer | Infeasible:
        """Return the answer, or why there is none, with what is proven all the same."""
        found = self._run()
        return found if isinstance(found, Answer) else replace(found, bound_s=self._bound_s)

    def _run(self) -> Answer | Infeasible:
        search = self.search
        for _ in range(self.effort.corrections + 1):
            solution = self._solve(self.settings.cutoff_s)
            if solution.values is not None:
                self._note(solution)
            elif search.best is not None:
                if not search.note_nothing():
                    break
            elif (is_slower := solution.outcome is Outcome.SLOWER) or not self.settings.seeks_least:
                # what a larger aim let in did not fit: between the two there may be what does, and is fast enough
                if not search.note_nothing() and not (is_slower and self._widens()):
                    break
            elif self._widens():
                continue
            elif (refused := self._begin_from_smallest()) is not None:
                return refused
            else:
                continue  # under the row budget of that plan the rows let in others, and prove what they take
            if self._is_settled or self._is_over(self._deadline):
                break
        self._propose_others()
        if search.best is None and math.isfinite(self.settings.cutoff_s):
            return Infeasible(Outcome.SLOWER if self._bound_s >= self.settings.cutoff_s else Outcome.STOPPED)
        best = search.best or self._known()
        # an answer that fitted no aim of the whole search fits, and yet not without rows
        low = float(self.budget) if search.low is None else search.low
        return self._smallest_that_fits() if best is None else replace(self._proven(best), row_budget=low)

    def proposed(self) -> Iterator[Options]:
        """Yield the shardings that are fastest by the rows, as the row budget follows what their simulations hold, each once."""
        seen: set[tuple[int, ...]] = set()
        for _ in range(self.effort.corrections + 1):
            if self._is_settled or self._deadline.has_passed:
                break
            solution = self._solve(self.settings.cutoff_s)
            if solution.values is not None:
                answer = self.solver.answer(solution, self.settings.floor_s)
                self.search.note(answer, self.solver.full()[3].peak_bytes(solution.values))
                options = answer.choice.options
                if (key := tuple(options.values())) not in seen:
                    seen.add(key)
                    yield options
            elif not self.search.note_nothing():
                break

    def _widens(self) -> bool:
        """Move on to the wider row budget, if there is one that was not tried."""
        if self.wider is None or not self.settings.seeks_least or (wide := self.wider()) <= self.search.aim:
            return False
        self.search.aim, self.wider = wide, None
        return True

    def _propose_others(self) -> None:
        """Solve again under the row budget that proves most, while something there may be faster than the best.

        Each time all shardings that are fitted by themselves are forbidden, so that another one is proposed. It ends where that
        brings nothing: many shardings differ by what takes neither time nor memory.
        """
        model, sharding, *_ = self.solver.full()
        with model.extra_rows():
            for _ in range(self.effort.proposals):
                new = self._fitted.keys() - self._forbidden
                if self._is_proven or not new or self._is_over(self._deadline):
                    break
                for key in new:
                    forbid(model, sharding, self._fitted[key])
                self._forbidden |= new
                to_beat_s, proven_s = self._to_beat, self._proven_s
                self.search.aim = max(self._proving, key=self._proving.__getitem__)
                solution = self._solve(to_beat_s)
                if solution.values is not None:
                    self._note(solution)
                if self._to_beat == to_beat_s and self._proven_s <= (1 + GAP) * proven_s:
                    break

    def _proven(self, answer: Answer) -> Answer:
        """Return an answer with its gap to what is proven of all shardings."""
        if not self.settings.floor_s < self._proven_s < math.inf:
            return answer
        return answer.bounded(min(self._proven_s, answer.objective_s))

    @property
    def _proving(self) -> dict[float, float]:
        """The row budgets whose proofs count, with the bounds: from the true one on, and from one on that had an answer."""
        least = max(self.budget, self.search.low or 0.0)
        return {aim: bound for aim, bound in self._proofs.items() if aim >= least}

    @property
    def _proven_s(self) -> float:
        """The seconds that no plan beats which the rows let into the budget, or into a larger one that had an answer."""
        return max(self._proving.values(), default=math.inf)

    @property
    def _bound_s(self) -> float:
        """The seconds that no plan beats which the rows let into the budget, where no answer is found."""
        if self._least_rows_bytes > self.budget:
            return math.inf
        return max(self._proving.values(), default=0.0)

    @property
    def _is_proven(self) -> bool:
        """True where nothing that the rows let in is faster than what is to be beaten by more than the objective is off."""
        return math.isinf(self._to_beat) or self._to_beat <= (1 + CLOSE) * self._proven_s

    @property
    def _is_settled(self) -> bool:
        """True where no other row budget is worth a solve; it is while what is proven is much faster than what fits."""
        search = self.search
        return search.is_closed or search.is_full if self._is_proven else search.is_spent or search.is_flat

    def _known(self) -> Answer | None:
        """Return the fastest answer with a known sharding that fits: where the search found none in time."""
        for options in self.solver.starts(self.settings):
            self.fitted(options)
        return self.search.best

    def _solve(self, cutoff_s: float) -> Solution:
        """Solve under the rows' present budget, for what takes less than `cutoff_s`."""
        solver, settings, search = self.solver, self.settings, self.search
        model, sharding, recompute, memory = solver.full()
        set_budget(model, memory, search.aim)
        # time for a second look, at the budget of the rows that the first one asks for
        remaining = max(1.0, self.effort.solve_share * self._deadline.left_s)
        stages = settings.stages(model, sharding, recompute, solver.starts_for(settings), remaining)
        stages.cutoff, stages.floor = cutoff_s, settings.floor_s
        stages.patience = self.effort.patience_within or stages.patience
        if self._earlier is not None and self._earlier[0] <= search.aim and not self._forbidden:
            stages.earlier = self._earlier[1]
        solution = solve_in_stages(stages)
        bound = cutoff_s if solution.outcome is Outcome.INFEASIBLE else solution.bound
        if math.isfinite(bound):
            self._proofs[search.aim] = max(bound, self._proofs.get(search.aim, bound))
        if solution.values is not None:
            self._earlier = search.aim, solution.values
        return solution

    def _note(self, solution: Solution) -> None:
        assert solution.values is not None
        answer = self.solver.answer(solution, self.settings.floor_s)
        rows_peak = self.solver.full()[3].peak_bytes(solution.values)
        self.search.note(answer, rows_peak)
        self._refit(answer, rows_peak, solution.bound)

    def _begin_from_smallest(self) -> Infeasible | None:
        """Restart from the smallest plan, since the rows rejected every one: its own peak by the rows is the next row budget."""
        if self._is_hopeless():
            return Infeasible(Outcome.DOES_NOT_FIT, least_bytes=self._least_rows_bytes, seek=self._seek)
        least = self._find_least()
        if isinstance(least, Outcome):
            return None if least is not Outcome.INFEASIBLE and self._known() is not None else refused(least)
        smallest, rows_peak = least.answer, least.rows_peak
        if smallest.simulation.peak_bytes > self.budget:
            if self._least is not None or not self._may_hold_less(least):
                return Infeasible(Outcome.DOES_NOT_FIT, least.binding, smallest)
            self._least, self.search.aim = least, (1 + NEAR) * rows_peak
            return None
        # However long it took to see that there is nothing to begin with, what is there may be made faster.
        self._deadline = self._deadline.later(
            self.settings.deadline.part(self.effort.beside_share * self.settings.time_limit_s)
        )
        self.search.aim = rows_peak
        self.search.note(smallest)
        self._refit(smallest, rows_peak, -math.inf)
        self.search.is_full = False  # that it fits says nothing of what is fastest
        return None

    def _is_hopeless(self) -> bool:
        """Return true where the rows let nothing into a budget that is larger by more than they may count too much."""
        wide = self.effort.hopeless * self.budget
        if self._least is not None or not self.solver.lets_nothing_into(wide, self.settings):
            return False
        self._least_rows_bytes = wide
        return True

    def _seek(self, deadline: Deadline) -> Infeasible:
        """Return why there is no answer, with what holds least."""
        least = self.solver.least(replace(self.settings, deadline=deadline))
        if isinstance(least, Outcome):
            return Infeasible(Outcome.DOES_NOT_FIT, least_bytes=self._least_rows_bytes)
        return Infeasible(Outcome.DOES_NOT_FIT, least.binding, least.answer)

    def _find_least(self) -> Least | Outcome:
        least = self._least or self.solver.least(self.settings)
        if isinstance(least, Outcome):
            return least
        self._least_rows_bytes = least.rows_bound
        fits = least.answer.simulation.peak_bytes <= self.budget < math.inf
        return self.solver.keeping_more(least, self.budget, self.settings) if fits else least

    def _may_hold_less(self, least: Least) -> bool:
        """Return true where the smallest plan misses the budget by less than the rows count too much of it.

        A plan that is a little larger by the rows may then be smaller by the simulation.
        """
        peak_bytes = least.answer.simulation.peak_bytes
        return peak_bytes - self.budget < least.rows_peak - peak_bytes

    def _smallest_that_fits(self) -> Answer | Infeasible:
        least = self._find_least()
        if isinstance(least, Outcome):
            return refused(least)
        if least.answer.simulation.peak_bytes <= self.budget:
            return replace(least.answer, row_budget=float(self.budget))
        return Infeasible(Outcome.DOES_NOT_FIT, least.binding, least.answer)

    def _is_over(self, part: Deadline) -> bool:
        """Return true once `part` is used up or, where an answer is known, the deadline of the whole question has passed."""
        return part.is_used_up or (self.search.best is not None and self.settings.deadline.has_passed)

    def _refit(self, answer: Answer, rows_peak: float, bound: float) -> None:
        """Choose anew what is kept with the sharding of `answer`, where that does not fit or leaves much."""
        left = self.budget - answer.simulation.peak_bytes
        options = answer.choice.options
        if 0 <= left <= NEAR * self.budget or tuple(options.values()) in self._held:
            return
        own = Search(self.budget, self.effort, rows_peak)
        own.note(answer)
        self._fit(options, own, bound, bisects=self.solver.is_small)

    def fitted(self, options: Options) -> Answer | None:
        """Return the fastest answer with one sharding that fits; None where there is none below the cutoff."""
        bisects = self.effort.bisects_known
        self._fit(options, Search(self.budget, self.effort, self.search.aim), -math.inf, bisects)
        if self.search.best is None and not self.solver.hides:
            aim = self.solver.aim_of(options, self.budget)
            if aim > self.search.aim:
                self._fit(options, Search(self.budget, self.effort, aim), -math.inf, bisects)
        return self.search.best

    def beside(self, answer: Answer) -> Answer | None:
        """Return the fastest answer that fits among the options of `answer` and those that the relaxation mixes."""
        solver = self.solver
        model, sharding, recompute, memory = solver.full()
        set_budget(model, memory, self.search.aim)
        stages = self.settings.stages(model, sharding, recompute)
        stages.cutoff = self._to_beat * (1 - GAP)
        solution = solve_beside(stages, answer.choice.options)
        if solution.values is not None and solution.objective < self._to_beat:
            self._note(solution)
        best = self.search.best
        return None if best is None or best.objective_s >= self.settings.cutoff_s else best

    def _fit(self, options: Options, own: Search, bound: float, bisects: bool) -> None:
        """Choose what is kept with one sharding, under a budget of the rows of its own.

        bisects: whether it goes back up where that fell too far below one whose answer did not fit; without an answer it does.
        """
        self._held.add(tuple(options.values()))
        held = self.settings.held_to(options)
        deadline = self._deadline.later(
            self.settings.deadline.beyond(self.effort.known_share * self.settings.time_limit_s)
        )
        for _ in range(self.effort.refits):
            if own.is_full or own.is_narrow or own.is_flat or self._is_over(deadline):
                break
            found = self._solve_held(held, own.aim, deadline)
            if found.values is None or found.objective >= self._to_beat:
                if not own.note_nothing() or not (bisects or self.search.best is None):
                    break
                continue
            refitted = self._answer_of(found, bound)
            own.note(refitted, self.solver.full()[3].peak_bytes(found.values))
            if refitted.simulation.peak_bytes <= self.budget and refitted.objective_s < self.settings.cutoff_s:
                self.search.offer(refitted)
        if own.is_closed or own.is_flat:
            self._fitted[tuple(options.values())] = options

    def _answer_of(self, found: Solution, bound: float) -> Answer:
        floor_s = self.settings.floor_s
        return self.solver.answer(replace(found, bound=min(found.objective, max(bound, floor_s))), floor_s)

    def _solve_held(self, held: Settings, aim: float, deadline: Deadline) -> Solution:
        model, sharding, recompute, memory = self.solver.full()
        set_budget(model, memory, aim)
        limit = max(1.0, deadline.left_s)
        return solve_in_stages(held.stages(model, sharding, recompute, None, limit))

    @property
    def _to_beat(self) -> float:
        best = self.search.best
        return self.settings.cutoff_s if best is None else min(best.objective_s, self.settings.cutoff_s)
