"""One mesh as a space of the search, looked through for each way in which parameters travel (`rank.travel`).

`Space` is what `best_first` holds in its queue; `forms` has the other kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from ..program.decisions import OVERLAPS
from .costs.price import Price
from .incumbent import Found, Incumbent
from .model.hidden import EXPOSED_WITHIN
from .model.outcome import Outcome
from .problem.recipes import restriction
from .search.answer import Answer, Infeasible, Settings
from .search.effort import CLOSE, GAP, NEAR, Effort
from .search.guard import faster_kept, no_slower_than_known, proposed_one_by_one, unproven
from .search.proposals import first_that_fits
from .search.solve import Solver, both
from .search.two_stage import solve_two_stage
from .task import Place

_HIDING = ("buckets", "ahead", "as seen", "none")
"""Where computation hides what travels, buckets come first: they are proven in a fraction of the time that `ahead` takes,
and where memory binds they are seldom slower, since what they do not hold is kept instead."""
_ONE_BY_ONE = ("none", "buckets")
"""Where nothing is hidden, one by one comes first, since it is soon proven; shared latencies follow."""
_KNOWN = "fsdp"
"""The recipe that `joint` is held against where that takes little: of those that hold little, it is solved soonest."""


class Priority(IntEnum):
    """The order in which spaces are searched, the least first; spaces of one priority follow their bounds.

    What changes the results of a step comes last: a loss in chunks behind whole logits, sampled gradients behind exact ones.
    """

    PLAIN = 0
    REFUSED = 1
    """A recipe that `joint` is held against, where the search of everything found nothing in its time."""
    STAGES = 2
    CHUNKS = 3
    SAMPLED = 4


class Space:
    """A part of what may be chosen."""

    bound_s: float = 0.0
    priority: Priority = Priority.PLAIN

    def is_wanted(self, incumbent: Incumbent) -> bool:
        """Return true if it may hold something faster; what is left out for lack of time, the incumbent is told."""
        raise NotImplementedError

    def search(self, incumbent: Incumbent, is_last: bool) -> Iterator[Space]:
        """Look through the space, offer what is found, and yield what may be searched because of that.

        is_last: nothing else waits, so all of the time may be taken.
        """
        raise NotImplementedError


@dataclass(eq=False)
class Ways(Space):
    """A program on one mesh, searched for each way in which parameters travel, as long as the next may be worth it.

    What travels together shares its latency, and holds more memory than what travels one by one. Each search has its own
    objective (`joined`, `hidden`), its own rows (`bucket_memory`) and simulations of its own; a later one looks only for what
    is faster than what is found already, tried as far ahead as it fits.
    """

    place: Place
    recipe: str
    turn: int = 0
    """The place in the order of ways of the one that is next."""
    known: Found | None = None
    """The fastest answer of the ways before."""
    refused: Infeasible | None = None
    """Why `joint` has none, of a recipe that it is held against."""
    bound_s: float = 0.0
    priority: Priority = Priority.PLAIN
    is_beside: bool = False
    """True for a recipe that `joint` is held against, which no answer on this mesh cuts off, or that is tried where it has none."""
    is_again: bool = False
    """True if a part of the time has not been enough."""
    is_relaxed: bool = False
    is_bound: bool = False
    """True once memory is known to bind: nothing fits, or what does gives time for memory."""

    @property
    def ways(self) -> tuple[str, ...]:
        solver = self.place.solver
        if solver.travel == "none":
            return ("none",)
        if not solver.hides:
            return _ONE_BY_ONE
        return _HIDING if self.recipe == "joint" else tuple(way for way in _HIDING if way != "as seen")

    def is_wanted(self, incumbent: Incumbent) -> bool:
        if self.refused is not None:
            return incumbent.best is None and incumbent.proposal is None
        is_first = self.turn == 0 and not self.is_beside
        if incumbent.is_late or (is_first and incumbent.best is not None and self._is_dear(incumbent)):
            if is_first:
                incumbent.leave_out(self.place)
            elif self.known is not None:
                self._leave_unproven(incumbent, self.known)
            return False
        return self.bound_s < incumbent.step_s * (1 - GAP)

    def _is_dear(self, incumbent: Incumbent) -> bool:
        """Return true if relaxing this mesh is expected to take more than is left."""
        known, num_axes = incumbent.relaxing_s, len(self.place.axes)
        if not known or self.is_relaxed:
            return False
        near = max((num for num in known if num <= num_axes), default=min(known))
        growth = Effort.axis_factor ** max(0, num_axes - near)  # of the class: this mesh's problem may not be built yet
        return known[near] * growth > incumbent.deadline.left_s

    def search(self, incumbent: Incumbent, is_last: bool) -> Iterator[Space]:
        if not self.is_relaxed and math.isfinite(incumbent.step_s):  # there is something to hold its bound against
            self._relax(incumbent)
            yield self
            return
        task = self.place.task
        if self.refused is not None:
            incumbent.deadline.extend(self.place.solver.effort.after_refusal_s)
        is_only = is_last and len(self.ways) == 1 and task.variants is None
        is_whole = is_only or self.is_again or self.turn == self._last or self.known is not None
        task.deadline = incumbent.deadline if is_whole else incumbent.deadline.first_part()
        settings = self._settings(incumbent)
        if self.turn == 0 and not self.is_again and settings.seeks_least and not self.is_beside:
            self._propose(incumbent, settings)
        if (known := self._proposal(incumbent)) is not None:
            settings.cutoff_s = min(settings.cutoff_s, known.step_s * (1 - GAP))
        found = self._solve(settings)
        task.deadline = incumbent.deadline
        if isinstance(found, Infeasible):
            yield from self._after_nothing(incumbent, found, is_whole)
        else:
            yield from self._after(incumbent, found)

    def _relax(self, incumbent: Incumbent) -> None:
        bound_s, work_s = self.place.solver.relaxed
        self.bound_s, self.is_relaxed = max(self.bound_s, bound_s), True
        incumbent.relaxing_s[len(self.place.axes)] = work_s
        incumbent.deadline.count(work_s)

    def _settings(self, incumbent: Incumbent) -> Settings:
        """Return what the way is asked: anything that fits, or what is faster than the ways before, in a part of the time."""
        settings = self.place.settings(self.recipe, incumbent.cutoff_s(self.place))
        has_answer = self.known is not None or (self.is_beside and self.refused is None)
        settings.seeks_least = not has_answer and math.isinf(settings.cutoff_s)
        if self.is_beside:
            narrow = restriction(self.place.problem, self.recipe).allowed
            given = self.place.restriction("joint")
            settings.restriction = replace(given, allowed=both(given.allowed, narrow), offload=False)
        if self.is_beside and self.refused is None:
            most_s = incumbent.step_s * (1 + self.place.solver.effort.most_off)
            settings.cutoff_s = min(settings.cutoff_s, most_s)
        if self.known is None:
            return settings
        effort = self.place.solver.effort
        return replace(
            settings, cutoff_s=min(settings.cutoff_s, self.known.step_s * (1 - GAP)),
            time_limit_s=settings.time_limit_s * effort.later_way_share, row_budget=self.known.answer.row_budget or 0.0,
        )  # fmt: skip

    def _propose(self, incumbent: Incumbent, settings: Settings) -> None:
        """Give the incumbent a plan that takes no search, unless it has one."""
        if incumbent.proposal or self.place.problem.costs.resting is not None:
            return  # what takes no search keeps in memory what may rest on disks
        known = first_that_fits(self.place, self.recipe, settings)
        if known is not None:
            incumbent.proposal = Found(self.place, *self.place.overlapped(known))
            if settings.progress is not None:
                settings.progress.fits(incumbent.proposal.step_s)

    def _proposal(self, incumbent: Incumbent) -> Found | None:
        """Return the plan on this mesh that took no search, where a budget binds and no search has found another."""
        known = incumbent.proposal
        is_here = known is not None and known.place is self.place and self.place.task.budget_bytes is not None
        return known if is_here and incumbent.best is None else None

    def _solve(self, settings: Settings) -> Answer | Infeasible:
        if self.recipe == "two-stage":
            return solve_two_stage(self._solver, settings)
        answer = self._solver.solve(settings)
        if self.recipe != "joint":
            return answer
        return no_slower_than_known(self._solver, settings, answer, self._takes)

    def _takes(self, answer: Answer) -> float:
        """Return the seconds of a step, its parameters travelling as far ahead as the budget allows."""
        return self.place.overlapped(answer)[1].step_s

    @property
    def _solver(self) -> Solver:
        way, solver = self.ways[self.turn], self.place.solver
        if way != "as seen":
            return solver.travelling(way)  # type: ignore[arg-type]
        assert self.known is not None
        return solver.travelling("ahead").exposing(_delta(self.known.answer, self.known.price))

    # What follows

    def _after(self, incumbent: Incumbent, answer: Answer) -> Iterator[Space]:
        if self.refused is not None:
            answer = unproven(self.place.solver, answer)
        if self.is_beside or (self.known is not None and self.known.answer.binds):
            # memory binds, or this would not have been looked at
            answer = replace(answer, row_budget=answer.row_budget or float(self.place.task.usable_bytes or 0))
        found, proposal = self._running(answer), self._proposal(incumbent)
        if proposal is not None and proposal.step_s < found.step_s * (1 - GAP):
            found = proposal.bounded(answer.bound_s, answer.floor_s, answer.row_budget)
        if self.recipe == "joint" and self.ways[self.turn] == "buckets" and self.place.solver.hides:
            found = self._proposed_one_by_one(found)
        yield from self._take(incumbent, found)

    def _proposed_one_by_one(self, known: Found) -> Found:
        """Return `known` or, where little is proven of it, what is faster of the shardings that are good one by one."""
        answer, solver, task = known.answer, self.place.solver, self.place.task
        is_near = answer.gap is not None and answer.gap <= NEAR
        if is_near or not answer.binds or task.budget_bytes is None or task.deadline.has_passed:
            return known
        settings = self.place.settings(self.recipe)
        settings.time_limit_s *= solver.effort.known_share
        found = proposed_one_by_one(solver, settings, answer, self._takes)
        return known if found is answer else self._running(found)

    def _running(self, answer: Answer) -> Found:
        """Return an answer as it will run: further ahead than it was searched, where that fits, and then faster."""
        running, price = self.place.overlapped(answer)
        if running.decisions.overlap != answer.decisions.overlap and price.step_s < answer.objective_s:
            running = replace(running, objective_s=price.step_s).bounded(min(answer.bound_s, price.step_s))
        return Found(self.place, running, price)

    def _take(self, incumbent: Incumbent, found: Found) -> Iterator[Space]:
        incumbent.offer(found)
        self.known = found if self.known is None or found.step_s < self.known.step_s else self.known
        self.is_bound = self.known.answer.binds
        yield from self._next(incumbent)

    def _after_nothing(self, incumbent: Incumbent, refused: Infeasible, is_whole: bool) -> Iterator[Space]:
        is_slower = refused.outcome is Outcome.SLOWER
        if self.known is not None:
            if refused.outcome is Outcome.STOPPED:
                self._leave_unproven(incumbent, self.known, refused.bound_s)
            yield from self._next(incumbent)
        elif is_slower and (proposal := self._proposal(incumbent)) is not None:
            budget = float(self.place.task.usable_bytes or 0)
            yield from self._take(incumbent, proposal.bounded(proposal.step_s * (1 - GAP), refused.floor_s, budget))
        elif (turn := self._instead(is_slower)) is not None:
            if not is_slower and not self.is_beside:
                self._note_refusal(incumbent, refused)
            yield replace(self, turn=turn)
        elif refused.outcome is Outcome.STOPPED and not is_whole:
            yield replace(self, is_again=True)
        elif not is_slower and not self.is_beside:
            incumbent.failures.append((self.place, refused))
            self._note_refusal(incumbent, refused)
            self.is_bound = True
            if refused.outcome is Outcome.STOPPED:
                yield from self._beside(refused)

    @property
    def _last(self) -> int:
        return len(self.ways) - 1

    def _instead(self, is_slower: bool) -> int | None:
        """Return the way to search where this one has nothing: one that hides more if all is slower, else one that holds less."""
        here = OVERLAPS.index(self.ways[self.turn])  # type: ignore[arg-type]
        wanted = OVERLAPS[here + 1 :] if is_slower else OVERLAPS[:here]
        later = range(self.turn + 1, len(self.ways))
        return next((turn for turn in later if self.ways[turn] in wanted), None)

    def _next(self, incumbent: Incumbent) -> Iterator[Space]:
        """Yield what is worth it after the ways before have found an answer."""
        if self.known is None:
            return
        for turn in range(self.turn + 1, len(self.ways)):
            if self._is_worth_it(self.ways[turn], self.known):
                yield replace(self, turn=turn, is_again=False)
                return
        if self.turn < self._last and self.place.solver.hides:
            self._leave_unproven(incumbent, self.known)
        if not self.known.answer.binds:
            self._hold_against_recipes(incumbent, self.known)
        elif not self.is_beside:
            yield from self._beside()

    def _hold_against_recipes(self, incumbent: Incumbent, known: Found) -> None:
        """Offer what recipes and known shardings keep within the budget, where the objective is off and they are faster."""
        is_off = known.step_s > (1 + GAP) * known.answer.objective_s
        if self.recipe != "joint" or not is_off or known is not incumbent.best:
            return
        settings = self.place.settings(self.recipe)
        settings.floor_s = known.answer.floor_s
        if settings.restriction.fates or self.place.problem.costs.resting is not None:
            return  # recipes leave nothing, and keep in memory what may rest on disks
        solver = self.place.solver.travelling(self.ways[0])  # type: ignore[arg-type]
        for answer in faster_kept(solver, settings, known.step_s, lambda each: self.place.price_of(each).step_s):
            incumbent.offer(self._running(answer.bounded(known.answer.bound_s)))

    def _leave_unproven(self, incumbent: Incumbent, known: Found, bound_s: float = 0.0) -> None:
        """Lower the bound to what holds for ways that are not searched to their end: what is proven of one way binds no other.

        bound_s: what is proven of those.
        """
        if known.answer.binds and self.place.task.budget_bytes is not None:
            incumbent.bound_s = min(incumbent.bound_s, max(bound_s, known.answer.floor_s))

    def _note_refusal(self, incumbent: Incumbent, refused: Infeasible) -> None:
        """Lower the bound where no plan fitted, and rows that count too much or too little may have missed one.

        Where a lack of time was the reason, on the last way, the mesh is named as not searched instead.
        """
        if refused.outcome is Outcome.DOES_NOT_FIT or self.turn < self._last:
            bound_s = refused.bound_s
            if self.ways[self.turn] == "buckets" and self.place.solver.hides and math.isfinite(bound_s):
                # `ahead` holds more and is passed over: what is proven of buckets does not bind it
                bound_s = min(bound_s, self.place.solver.travelling("ahead").bound_within_s(self._settings(incumbent)))
            incumbent.bound_s = min(incumbent.bound_s, max(bound_s, refused.floor_s))

    def _beside(self, refused: Infeasible | None = None) -> Iterator[Space]:
        """Yield the spaces of the recipes that `joint` is held against.

        A search of its own lands on plans that the rows let in there, and count too much for in the search of everything.
        `two-stage`, which looks at other shardings, is one of them where the objective is off by more than it often is, and a
        search takes little.
        refused: why there is no answer; then the recipe is tried for want of one.
        """
        place, priority = self.place, self.priority if refused is None else max(self.priority, Priority.REFUSED)
        if self.recipe != "joint" or place.task.budget_bytes is None:
            return
        if place.problem.costs.resting is not None:
            return  # the recipe keeps in memory what may rest on disks
        often_off = place.solver.effort.often_off
        is_off = self.known is not None and self.known.step_s > (1 + often_off) * self.known.answer.objective_s
        for recipe in (_KNOWN, "two-stage") if is_off and place.problem.is_quick else (_KNOWN,):
            if all(both(place.restriction("joint").allowed, restriction(place.problem, recipe).allowed).values()):
                yield Ways(place, recipe, 0, None, refused, self.bound_s, priority, is_beside=True, is_relaxed=True)

    def _is_worth_it(self, way: str, known: Found) -> bool:
        """Return true where the next way may gain more than the gap on what the ways before found."""
        answer, seconds, solver = known.answer, known.step_s, self.place.solver
        if way == "as seen":
            return seconds - answer.objective_s > NEAR * answer.objective_s and known.price.hidden_comm_s > 0
        if not answer.binds or self.place.task.budget_bytes is None:
            return False  # what holds less is not faster
        if not solver.hides:
            first = solver.travelling(self.ways[0])  # type: ignore[arg-type]
            shareable_s = first.plain()[1].joined.shareable_s
            return shareable_s > solver.effort.worth * answer.objective_s and seconds * (1 - GAP) > answer.floor_s
        return seconds > (1 + CLOSE) * answer.floor_s


def _delta(answer: Answer, price: Price) -> float:
    """Return the share of parameters on their way that a step exposes, by the price of an answer."""
    missed_s = price.step_s - answer.objective_s
    return EXPOSED_WITHIN + (1 - EXPOSED_WITHIN) * missed_s / (price.hidden_comm_s + missed_s)
