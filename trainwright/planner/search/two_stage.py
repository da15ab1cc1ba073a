"""The two-stage baseline: shard first with activations ignored, then recompute for that sharding alone.

The first stage must guess how much of the budget parameters may take. Several shares are tried, and the sharding that is
fastest without a budget; the fastest answer of all is returned.
"""

from __future__ import annotations

from dataclasses import replace

from ..model.outcome import Outcome
from .answer import Answer, Infeasible, Settings
from .solve import Solver


def solve_two_stage(solver: Solver, settings: Settings) -> Answer | Infeasible:
    """Return the best answer over the shares of the budget that the first stage may give to what rests in memory."""
    if settings.budget_bytes is None:
        return solver.solve(settings)
    began_s = settings.deadline.work_s
    results = []
    shardings = solver.first_stages(settings)
    part_s = settings.time_limit_s / max(1, len(shardings))
    for options in shardings:
        allowed = {decision: frozenset([option]) for decision, option in options.items()}
        fixed = replace(settings.restriction, allowed=allowed)
        results.append(solver.solve(replace(settings, restriction=fixed, time_limit_s=part_s)))
    answers = [result for result in results if isinstance(result, Answer)]
    if answers:
        best = min(answers, key=lambda answer: answer.objective_s)
        best.solve_s = settings.deadline.work_s - began_s
        return best
    for outcome in (Outcome.STOPPED, Outcome.SLOWER):
        # of a share that was not looked at to its end nothing is known about its memory
        if undecided := [found for found in results if isinstance(found, Infeasible) and found.outcome is outcome]:
            return undecided[0]
    failures = [result for result in results if isinstance(result, Infeasible)]
    if known := [found for found in failures if found.smallest is not None]:
        return min(known, key=lambda found: found.smallest.simulation.peak_bytes if found.smallest else 0)
    if unsought := [found for found in failures if found.seek is not None]:
        return min(unsought, key=lambda found: found.least_bytes)
    return Infeasible(Outcome.DOES_NOT_FIT, ("parameters and optimizer states alone",), solver.smallest(settings))
