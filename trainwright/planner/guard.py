"""The joint answer is no slower than that of a recipe.

By the rows no recipe can be faster. But the rows count a little too much, for some plans more than for others, so a
sharding that comes second by the rows may keep more within the true budget. Each known sharding is given the chance.
"""

from __future__ import annotations

from dataclasses import replace

from .solve import Answer, Settings, Solver
from .stages import GAP

_MORE_ROOM = 1.02
"""How much more than the joint answer's the budget of the rows may have to be for another sharding."""


def no_slower_than_known(solver: Solver, settings: Settings, answer: Answer) -> Answer:
    """Return `answer`, or the one of a known sharding that is faster within the budget by more than the proven gap."""
    aim = solver.last_aim
    if settings.budget_bytes is None or aim is None or settings.restriction.fates:
        return answer
    for options in solver.starts(settings):
        if options == answer.choice.options:
            continue
        allowed = {decision: frozenset([option]) for decision, option in options.items()}
        held = replace(
            settings,
            restriction=replace(settings.restriction, allowed=allowed),
            cutoff_s=answer.objective_s * (1 - max(GAP, answer.gap or 0.0)),
            time_limit_s=settings.time_limit_s / 8,
        )
        found = solver.within(held, settings.budget_bytes, aim * _MORE_ROOM)
        if isinstance(found, Answer) and found.objective_s < answer.objective_s:
            bound_s = answer.objective_s * (1 - (answer.gap or 0.0))
            found.gap = max(0.0, 1 - bound_s / found.objective_s)
            found.status, found.notes, found.solve_s = answer.status, answer.notes, answer.solve_s
            answer = found
    return answer
