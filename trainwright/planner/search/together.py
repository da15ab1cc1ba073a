"""Within a budget, a search for each way in which parameters travel (`rank.travel`): one by one, in buckets, ahead.

What travels together shares its latency, and holds more memory than what travels one by one. Each search has its own
objective (`joined`, `hidden`), its own rows (`bucket_memory`) and simulations of its own; a later one looks only for what is
faster than what is found already, tried as far ahead as it fits.

Where nothing is hidden, one by one comes first, since it is soon proven; buckets follow where latencies are worth it. Where
computation hides what is on its way, the furthest ahead comes first, and what holds less follows where nothing fits, where
the answer is far from what is proven, or where memory costs much for what a search takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ...program.decisions import Overlap
from ..costs.price import Price
from ..model.hidden import EXPOSED
from ..model.milp import Solution
from ..model.outcome import Outcome
from ..problem.recipes import restriction
from .answer import Answer, Infeasible, Settings
from .guard import OFF, PROVEN, Takes, no_slower_than_known, unproven
from .solve import Solver, both
from .stages import FEW_COLUMNS, GAP
from .two_stage import solve_two_stage

_KNOWN = "fsdp"
"""The recipe that `joint` is held against: of those that hold little, it is solved soonest."""
_WORTH = 0.01
"""The share of a step that all shareable latencies must take for a search to be worthwhile."""
_AHEAD: tuple[Overlap, ...] = ("ahead", "buckets", "none")
_ONE_BY_ONE: tuple[Overlap, ...] = ("none", "buckets")
_DEAR = 1.25
"""Where memory makes a step this many times slower than without a budget, overlaps that hold less are searched too."""
_DEAR_OF_SMALL = 1.02
"""The same ratio for a problem that is quick to simulate, or is small and had prefetches undercounted by the rows."""
_SHARE = 1 / 2
"""The share of the time limit that the second search gets."""
_ONE_SOLVE = 1 / 5
"""The share of that which one solve may take."""

Overlapped = Callable[[Answer], tuple[Answer, Price]]
"""An answer with its parameters travelling as far ahead as the budget allows, and what that takes."""


def search_ways(solver: Solver, recipe: str, settings: Settings, overlapped: Overlapped) -> Answer | Infeasible:
    """Solve for a recipe; where memory binds, for parameters that travel one way or another, and return what is fastest.

    Where that takes little, `joint` is held against `_KNOWN` as well: a search of its own lands on other plans that are as good
    by the objective, and the objective is off by some tenths of a per cent.
    """
    best = _search_ways(solver, recipe, settings, overlapped)
    is_bound = best.binds if isinstance(best, Answer) else best.outcome is Outcome.STOPPED
    if recipe != "joint" or not is_bound or settings.budget_bytes is None or not solver.problem.is_quick:
        return best
    given = settings.restriction
    narrow = both(given.allowed, restriction(solver.problem, _KNOWN).allowed)
    if not all(narrow.values()):
        return best
    held = replace(settings, restriction=replace(given, allowed=narrow, offload=False))
    known = _search_ways(solver, _KNOWN, held, overlapped)
    if isinstance(known, Infeasible):
        return best
    if isinstance(best, Infeasible):
        return replace(unproven(solver, known), binds=True)
    if overlapped(known)[1].step_s >= overlapped(best)[1].step_s:
        return best
    return replace(_better(best, known), binds=True)


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
        found = _search(other, recipe, _below(settings, step_s), takes, first.fastest)
        if isinstance(found, Answer) and takes(found) < step_s:
            best = _better(best, found)
    return best


def _as_seen(solver: Solver, settings: Settings, answer: Answer, price: Price, takes: Takes) -> Answer:
    """Return `answer`, or what is found by an objective that exposes of parameters on their way what its step does."""
    missed_s = price.step_s - answer.objective_s
    if missed_s <= OFF * answer.objective_s or price.hidden_comm_s <= 0:
        return answer
    delta = EXPOSED + (1 - EXPOSED) * missed_s / (price.hidden_comm_s + missed_s)
    found = _search(solver.exposing(delta), "joint", _below(settings, price.step_s), takes)
    if isinstance(found, Answer) and takes(found) < price.step_s:
        return _better(answer, found)
    return answer


def _may_be_less(solver: Solver, refused: Infeasible) -> bool:
    """Return true where the next overlap may succeed: GPUs try the one that holds most first, CPUs the one that holds least."""
    return (refused.outcome is Outcome.SLOWER) != solver.hides


def _in_part(settings: Settings) -> Settings:
    """Leave half of the time to other ways."""
    return replace(settings, deadline=settings.deadline.first_part())


def _below(settings: Settings, seconds: float) -> Settings:
    """Ask for what is faster than `seconds`, in a part of the time."""
    cutoff_s = min(settings.cutoff_s, seconds * (1 - GAP))
    limit_s = settings.time_limit_s * _SHARE
    return replace(settings, cutoff_s=cutoff_s, time_limit_s=limit_s, one_solve=_ONE_SOLVE)


def _better(answer: Answer, found: Answer) -> Answer:
    """Return the better answer with its gap to the bound that both searches prove."""
    better = found.bounded(min(answer.bound_s, found.bound_s))
    return replace(better, notes=answer.notes, solve_s=answer.solve_s + found.solve_s)


def _search(
    solver: Solver, recipe: str, settings: Settings, takes: Takes, fastest: Solution | None = None
) -> Answer | Infeasible:
    """Search one way; `fastest` is what is fastest where no memory binds, if it is known."""
    if recipe == "two-stage":
        return solve_two_stage(solver, settings)
    answer = solver.solve(settings, fastest)
    return no_slower_than_known(solver, settings, answer, takes) if recipe == "joint" else answer


def _is_worth_it(solver: Solver, answer: Answer, seconds: float, budget: int) -> bool:
    """Return true where the other overlap may gain more than the gap on an answer that takes `seconds`."""
    if solver.hides:
        # the rows saw less than there is: what travels ahead holds what binds
        is_tight = solver.last_aim is not None and solver.last_aim <= budget
        is_small = solver.full()[0].num_columns <= FEW_COLUMNS
        is_soon_seen = solver.problem.is_quick or (is_small and is_tight)
        dear = _DEAR_OF_SMALL if is_soon_seen else math.inf if solver.problem.is_long else _DEAR
        return answer.gap is None or answer.gap > PROVEN or seconds > dear * solver.floor_s
    shareable_s = solver.plain()[1].joined.shareable_s
    return shareable_s > _WORTH * answer.objective_s and seconds * (1 - GAP) > solver.floor_s
