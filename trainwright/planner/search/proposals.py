"""Plans that take no search: a known sharding with everything kept or everything rederived, priced by simulation alone.

The first that fits is what the search has to beat, and the plan where it gets too little time. How many are tried is counted,
not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...program.decisions import Overlap
from ..model.decode import Choice, decisions_from
from ..problem.problem import Decision, Problem
from ..problem.recipes import restriction
from .answer import Answer, Settings
from .solve import Solver, both

if TYPE_CHECKING:
    from ..task import Place

_RECIPES = ("fsdp", "ddp")
"""Those that every model has, the one that holds least first; the other is for where pins or the recipe forbid that."""
_SEARCHED = ("joint", *_RECIPES)
"""The solvers that may answer with one of these."""


def first_that_fits(place: Place, solver: str, settings: Settings) -> Answer | None:
    """Return the first proposal whose simulated peak is within the budget; None where none is, or pins forbid all."""
    if solver not in _SEARCHED:
        return None
    for choice, overlap in _choices(place.solver, settings, place.task.furthest_overlap):
        answer = _simulated(place, choice, overlap)
        if settings.budget_bytes is None or answer.simulation.peak_bytes <= settings.budget_bytes:
            return answer
    return None


def _choices(solver: Solver, settings: Settings, furthest: Overlap) -> Iterator[tuple[Choice, Overlap]]:
    """Yield choices and how parameters travel: where everything is kept, that makes little difference to what is held."""
    given = settings.restriction
    if "offload" in given.fates.values() or "state-offload" in given.fates.values():
        return
    each = (
        _options(solver.problem, both(given.allowed, restriction(solver.problem, name).allowed)) for name in _RECIPES
    )
    options = next((options for options in each if options is not None), None)
    if options is None:
        return
    if "recompute" not in given.fates.values():
        yield Choice(options), furthest
    if given.recompute and settings.budget_bytes is not None:
        yield _rederived(solver, options, {d for d, fate in given.fates.items() if fate == "keep"}), "none"


def _options(problem: Problem, allowed: dict[Decision, frozenset[int]]) -> dict[Decision, int] | None:
    """Return the first of the options that each decision is left with; None where one is left with none."""
    if not all(allowed.get(decision) for decision in problem.decisions):
        return None
    return {decision: min(allowed[decision]) for decision in problem.decisions}


def _rederived(solver: Solver, options: dict[Decision, int], kept: set[Decision]) -> Choice:
    """Return the choice that rematerialises all that it may and gathers every parameter again, except what is pinned as kept."""
    _, _, recompute, _ = solver.full()
    again = {decision for decision, _ in recompute.rerun if decision not in kept}
    converts = {(use, want): use.count for use, _, want in recompute.convert}
    return Choice(options, reruns={decision: decision.count for decision in again}, converts=converts)


def _simulated(place: Place, choice: Choice, overlap: Overlap) -> Answer:
    decisions = replace(decisions_from(place.problem, choice), overlap=overlap)
    simulation = place.simulate(decisions)
    seconds = place.price(simulation).step_s
    return Answer(choice, decisions, simulation, 1.0, seconds)
