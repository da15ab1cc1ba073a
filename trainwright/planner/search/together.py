"""Within a budget, a search for each way in which parameters travel (`rank.travel`): one by one, in buckets, ahead.

What travels together shares its latency, and holds more memory than what travels one by one. Each search has its own
objective (`joined`, `hidden`), its own rows (`bucket_memory`) and simulations of its own; a later one looks only for what is
faster than what is found already, tried as far ahead as it fits.

Where nothing is hidden, one by one comes first, since it is soon proven; buckets follow where latencies are worth it. Where
computation hides what is on its way, the furthest ahead comes first, and what holds less follows where nothing fits, where
the answer is far from what is proven, or where memory costs much for what a search takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...program.decisions import Overlap
from ..costs.price import Price
from ..model.hidden import EXPOSED
from ..model.outcome import Outcome
from ..problem.recipes import restriction
from .answer import Answer, Infeasible, Settings
from .effort import GAP, NEAR
from .guard import Takes, no_slower_than_known, unproven
from .solve import Solver, both
from .two_stage import solve_two_stage

_KNOWN = "fsdp"
"""The recipe that `joint` is held against: of those that hold little, it is solved soonest."""
_AHEAD: tuple[Overlap, ...] = ("ahead", "buckets", "none")
_ONE_BY_ONE: tuple[Overlap, ...] = ("none", "buckets")

Overlapped = Callable[[Answer], tuple[Answer, Price]]
"""An answer with its parameters travelling as far ahead as the budget allows, and what that takes."""


def search_ways(solver: Solver, recipe: str, settings: Settings, overlapped: Overlapped) -> Answer | Infeasible:
    """Solve for a recipe; where memory binds, for parameters that travel one way or another, and return what is fastest.

    Where that takes little, `joint` is held against `_KNOWN` as well: a search of its own lands on other plans that are as good
    by the objective, and the objective is off by some tenths of a per cent.
    """
    best = _search_ways(solver, recipe, settings, overlapped)
    is_bound = best.binds if isinstance(best, Answer) else best.outcome is Outcome.STOPPED
    if recipe != "joint" or not is_bound or settings.budget_bytes is None or not solver.effort.is_held_against_fsdp:
        return best
    if solver.problem.costs.resting is not None:
        return best  # which lets rest on disks what the recipe keeps
    given = settings.restriction
    narrow = both(given.allowed, restriction(solver.problem, _KNOWN).allowed)
    if not all(narrow.values()):
        return best
    held = replace(settings, restriction=replace(given, allowed=narrow, offload=False))
    known = _search_ways(solver, _KNOWN, held, overlapped)
    if isinstance(known, Infeasible):
        return best
    if isinstance(best, Infeasible):
        return replace(unproven(solver, known), row_budget=known.row_budget or float(settings.budget_bytes))
    if overlapped(known)[1].step_s >= overlapped(best)[1].step_s:
        return best
    return _better(best, known)


def _search_ways(solver: Solver, recipe: str, settings: Settings, overlapped: Overlapped) -> Answer | Infeasible:
    def takes(answer: Answer) -> float:
        return overlapped(answer)[1].step_s

    if solver.travel == "none":
        return _search(solver, recipe, settings, takes)
    first, *others = [solver.travelling(way) for way in (_AHEAD if solver.hides else _ONE_BY_ONE)]
    best = _search(first, recipe, _in_part(settings), takes)
    if isinstance(best, Answer) and recipe == "joint" and solver.hides and not settings.deadline.has_passed:
        best = _as_seen(first, settings, best, overlapped(best)[1], takes)
    for other in others:
        if isinstance(best, Infeasible):
            if not _may_be_less(solver, best):
                return _search(first, recipe, settings, takes) if best.outcome is Outcome.STOPPED else best
            best = _search(other, recipe, settings if other is others[-1] else _in_part(settings), takes)
            continue
        if not best.binds or settings.deadline.has_passed or settings.budget_bytes is None:
            return best
        step_s = takes(best)
        if not _is_worth_it(first, best, step_s, settings.budget_bytes):
            return best
        found = _search(other, recipe, _below(solver, settings, step_s), takes)
        if isinstance(found, Answer) and takes(found) < step_s:
            best = _better(best, found)
    return best


def _as_seen(solver: Solver, settings: Settings, answer: Answer, price: Price, takes: Takes) -> Answer:
    """Return `answer`, or what is found by an objective that exposes of parameters on their way what its step does."""
    missed_s = price.step_s - answer.objective_s
    if missed_s <= NEAR * answer.objective_s or price.hidden_comm_s <= 0:
        return answer
    delta = EXPOSED + (1 - EXPOSED) * missed_s / (price.hidden_comm_s + missed_s)
    found = _search(solver.exposing(delta), "joint", _below(solver, settings, price.step_s), takes)
    if isinstance(found, Answer) and takes(found) < price.step_s:
        return _better(answer, found)
    return answer


def _may_be_less(solver: Solver, refused: Infeasible) -> bool:
    """Return true where the next overlap may succeed: GPUs try the one that holds most first, CPUs the one that holds least."""
    return (refused.outcome is Outcome.SLOWER) != solver.hides


def _in_part(settings: Settings) -> Settings:
    """Leave half of the time to other ways."""
    return replace(settings, deadline=settings.deadline.first_part())


def _below(solver: Solver, settings: Settings, seconds: float) -> Settings:
    """Ask for what is faster than `seconds`, in a part of the time."""
    cutoff_s = min(settings.cutoff_s, seconds * (1 - GAP))
    limit_s = settings.time_limit_s * solver.effort.later_way_share
    return replace(settings, cutoff_s=cutoff_s, time_limit_s=limit_s, one_solve=solver.effort.later_solve_share)


def _better(answer: Answer, found: Answer) -> Answer:
    """Return the better answer with its gap to the bound that both searches prove."""
    better = found.bounded(min(answer.bound_s, found.bound_s))
    return replace(
        better, notes=answer.notes, solve_s=answer.solve_s + found.solve_s, row_budget=answer.row_budget,
        floor_s=answer.floor_s,
    )  # fmt: skip


def _search(solver: Solver, recipe: str, settings: Settings, takes: Takes) -> Answer | Infeasible:
    """Search one way."""
    if recipe == "two-stage":
        return solve_two_stage(solver, settings)
    answer = solver.solve(settings)
    return no_slower_than_known(solver, settings, answer, takes) if recipe == "joint" else answer


def _is_worth_it(solver: Solver, answer: Answer, seconds: float, budget: int) -> bool:
    """Return true where the other overlap may gain more than the gap on an answer that takes `seconds`."""
    if solver.hides:
        # the rows saw less than there is: what travels ahead holds what binds
        is_tight = answer.row_budget is not None and answer.row_budget <= budget
        dear = solver.effort.dear_of_small if is_tight and solver.is_small else solver.effort.dear
        return answer.gap is None or answer.gap > NEAR or seconds > dear * answer.floor_s
    shareable_s = solver.plain()[1].joined.shareable_s
    return shareable_s > solver.effort.worth * answer.objective_s and seconds * (1 - GAP) > answer.floor_s
