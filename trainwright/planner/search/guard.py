"""Holds a search's answer against known shardings and those of the recipes, so that it is no slower than theirs.

By the rows and the objective no sharding is faster than the answer. Both are approximations. The rows count some shardings a
little more too much than others, so one that comes second may keep more within the true budget; the objective differs a little
from the price, so of two that are nearly equal the second may be faster. So each known sharding is fitted to the budget, and
the one whose step takes least is the answer. Where the gap is wide, two more sources of shardings are tried: the options that
the relaxation mixes (`Fitting.beside`), and a search in which parameters travel one by one (`proposed_one_by_one`).

Where everything is kept, known shardings and those of the recipes are priced without being fitted (`faster_kept`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...program.decisions import OVERLAPS, Decisions
from ..model.outcome import Outcome
from ..problem.recipes import restriction
from .answer import Answer, Infeasible, Settings
from .effort import GAP, NEAR, Effort
from .fitting import Fitting
from .solve import Solver, both

Takes = Callable[[Answer], float]
"""The seconds of a step, its parameters travelling as far ahead as the budget allows."""
Prices = Callable[[Decisions], float]
"""The seconds of a step, without a simulation of what it holds."""


def no_slower_than_known(
    solver: Solver, settings: Settings, answer: Answer | Infeasible, takes: Takes
) -> Answer | Infeasible:
    """Return `answer`, or the one of a known sharding that is faster within the budget."""
    effort = solver.effort
    budget, settings = settings.budget_bytes, replace(settings, floor_s=answer.floor_s)
    if isinstance(answer, Infeasible):
        if budget is None or not _is_near(answer, effort.tries_below * budget):
            return answer
        found = _of_recipe(solver, settings, budget)
        return answer if found is None else unproven(solver, found)
    if budget is None or answer.row_budget is None or settings.restriction.fates or settings.deadline.has_passed:
        return answer
    best = _Best(answer, takes, effort, solver.is_small)
    is_unproven = answer.gap is None or answer.gap > NEAR or best.is_off
    if is_unproven:
        wanted = replace(best.below(settings), time_limit_s=settings.time_limit_s * effort.beside_share)
        best.offer(Fitting(solver, wanted, budget, effort.room * budget).beside(best.answer))
    room = effort.wide_room * budget if is_unproven or effort.is_wide else effort.room * answer.row_budget
    for options in solver.starts(settings):
        if settings.deadline.has_passed:
            break
        if options != best.answer.choice.options:
            best.offer(Fitting(solver, best.below(settings), budget, room).fitted(options))
    return best.answer


@dataclass(eq=False)
class _Best:
    """The answer whose step takes least so far."""

    answer: Answer
    takes: Takes
    effort: Effort
    is_small: bool
    """True for a small model, where fitting a sharding that the objective ranks slower costs little."""

    def __post_init__(self) -> None:
        self.step_s = self.takes(self.answer)

    @property
    def is_off(self) -> bool:
        """True where the price exceeds the objective by so much that the bound says little about the step."""
        return self.step_s > self.answer.objective_s * (1 + NEAR)

    def below(self, settings: Settings) -> Settings:
        """Ask for what may be faster: by the objective or, where that is soon seen or it was off, by what a step takes."""
        cutoff_s = self.answer.objective_s * (1 - GAP)
        if self.is_small:
            cutoff_s = self.answer.objective_s * (1 + self.effort.often_off)
        if self.is_off:
            cutoff_s = max(cutoff_s, self.step_s)
        limit_s = settings.time_limit_s * self.effort.guard_share
        return replace(settings, cutoff_s=min(cutoff_s, settings.cutoff_s), time_limit_s=limit_s)

    def offer(self, found: Answer | None) -> None:
        """Take another answer where it is faster, with the gap that it has to what is proven."""
        if found is None or (step_s := self.takes(found)) >= self.step_s:
            return
        better = found.bounded(self.answer.bound_s)
        self.answer = replace(
            better, notes=self.answer.notes, solve_s=self.answer.solve_s, row_budget=self.answer.row_budget,
            floor_s=self.answer.floor_s,
        )  # fmt: skip
        self.step_s = step_s


def proposed_one_by_one(solver: Solver, settings: Settings, known: Answer, takes: Takes) -> Answer:
    """Return `known`, or a faster answer with a sharding that is among the best where parameters travel one by one.

    Those are soon found, since no latency is shared and nothing hidden. Each is fitted for every way to travel.
    """
    budget, effort = settings.budget_bytes, solver.effort
    assert budget is not None
    best = _Best(known, takes, effort, solver.is_small)
    asked = replace(settings, cutoff_s=math.inf, floor_s=known.floor_s)
    fitting = replace(asked, time_limit_s=effort.guard_share * asked.time_limit_s)
    for options in Fitting(solver.travelling("none"), asked, budget).proposed():
        for way in OVERLAPS:
            # one by one all that travels counts as exposed: what that says of a plan which runs further ahead is too much
            cutoff_s = math.inf if way == "none" else best.step_s * (1 - GAP)
            wanted = replace(fitting, cutoff_s=cutoff_s)
            best.offer(Fitting(solver.travelling(way), wanted, budget, effort.room * budget).fitted(options))
    return best.answer


def faster_kept(solver: Solver, settings: Settings, step_s: float, prices: Prices) -> Iterator[Answer]:
    """Yield the answers with known shardings and those of recipes that keep everything, fit, and take less than `step_s`."""
    budget = settings.budget_bytes
    for options in solver.of_recipes(settings):
        if settings.deadline.has_passed:
            break
        if (kept := solver.keeping(options, settings)) is None:
            continue
        solution, choice, decisions = kept
        if (seconds := prices(decisions)) < step_s:
            found = solver.answer(solution, settings.floor_s, choice, solver.travel)
            if budget is None or found.simulation.peak_bytes <= budget:
                step_s = seconds
                yield found


def unproven(solver: Solver, found: Answer) -> Answer:
    """Return a recipe's answer with its gap in the whole space, of which no more is known than the bound without a budget."""
    return found.bounded(solver.lower_bound_s())


def _is_near(refused: Infeasible, most_bytes: float) -> bool:
    """Return true where the smallest plan of the search exceeds the budget by so little that a recipe may fit."""
    least = refused.smallest
    return refused.outcome is not Outcome.SLOWER and least is not None and least.simulation.peak_bytes <= most_bytes


def _of_recipe(solver: Solver, settings: Settings, budget: int) -> Answer | None:
    """Return the best of a narrower space, where the search of the whole one was left without proof."""
    narrow = both(settings.restriction.allowed, restriction(solver.problem, "fsdp").allowed)
    if not all(narrow.values()):
        return None
    held = replace(settings, restriction=replace(settings.restriction, allowed=narrow))
    found = solver.within(held, budget)
    return found if isinstance(found, Answer) else None
