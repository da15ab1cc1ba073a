"""The joint answer is no slower than that of a known sharding.

By the rows no sharding can be faster. But the rows count a little too much, for some plans more than for others, so a
sharding that comes second by the rows may keep more within the true budget. Each known sharding is given the chance. Where
the search ended far from what is proven, a recipe's answer is taken, and what lies between it and the relaxation looked at.
"""

from __future__ import annotations

from dataclasses import replace

from .answer import Answer, Infeasible, Settings
from .fitting import Fitting
from .recipes import restriction
from .solve import Solver, both
from .stages import GAP

PROVEN = 0.02
"""An answer further than this from what is proven is held against a whole recipe too."""
_NEAR = 1.1
_MORE_ROOM = 1.02
_MUCH_MORE_ROOM = 1.25
"""How much more than the budget the rows' is for a known sharding at first; much, where they were seen to be too careful, or
where to see it takes little."""


def no_slower_than_known(solver: Solver, settings: Settings, answer: Answer | Infeasible) -> Answer | Infeasible:
    """Return `answer`, or the one of a known sharding that is faster within the budget by more than a proven gap is."""
    budget, aim = settings.budget_bytes, solver.last_aim
    if isinstance(answer, Infeasible):
        found = None if budget is None or not _is_near(answer, budget) else _of_recipe(solver, settings, budget)
        return answer if found is None else _unproven(solver, found)
    if budget is None or aim is None or settings.restriction.fates or settings.deadline.has_passed:
        return answer
    unproven = answer.gap is None or answer.gap > PROVEN
    if unproven:
        answer = _faster(answer, _of_recipe(solver, settings, budget))
        wanted = replace(_below(settings, answer), time_limit_s=settings.time_limit_s / 2)
        answer = _faster(answer, Fitting(solver, wanted, budget, _MORE_ROOM * budget).beside(answer))
    room = _MUCH_MORE_ROOM * budget if unproven or solver.problem.is_quick else _MORE_ROOM * aim
    for options in solver.starts(settings):
        if settings.deadline.has_passed:
            break
        if options != answer.choice.options:
            answer = _faster(answer, Fitting(solver, _below(settings, answer), budget, room).fitted(options))
    return answer


def _unproven(solver: Solver, found: Answer) -> Answer:
    """A recipe's answer with the gap that it has in the whole space, of which no more is known than without a budget."""
    found = found.bounded(solver.lower_bound_s())
    return replace(found, status="optimal" if (found.gap or 0.0) <= GAP else "feasible")


def _is_near(refused: Infeasible, budget: int) -> bool:
    """Whether the least that a search found in its time misses the budget by so little that a recipe may fit."""
    least = refused.smallest
    return not refused.cut_off and least is not None and least.simulation.peak_bytes <= _NEAR * budget


def _below(settings: Settings, answer: Answer) -> Settings:
    """Ask for what is faster than `answer`."""
    return replace(settings, cutoff_s=answer.objective_s * (1 - GAP), time_limit_s=settings.time_limit_s / 4)


def _of_recipe(solver: Solver, settings: Settings, budget: int) -> Answer | None:
    """Return the best of a narrower space, where the search of the whole one was left without proof."""
    narrow = both(settings.restriction.allowed, restriction(solver.problem, "fsdp").allowed)
    if not all(narrow.values()):
        return None
    held = replace(settings, restriction=replace(settings.restriction, allowed=narrow))
    found = solver.within(held, budget)
    return found if isinstance(found, Answer) else None


def _faster(answer: Answer, other: Answer | None) -> Answer:
    if other is None or other.objective_s >= answer.objective_s:
        return answer
    better = other.bounded(answer.bound_s)
    return replace(better, status=answer.status, notes=answer.notes, solve_s=answer.solve_s)
