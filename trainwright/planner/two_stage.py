"""The two-stage baseline: shard first with activations ignored, then recompute for that sharding alone.

The first stage must guess how much of the budget parameters may take; several shares are tried and the best is kept.
"""

from __future__ import annotations

import time
from dataclasses import replace

from .decode import read_choice
from .milp import Model
from .recipes import Restriction
from .sharding import add_sharding
from .solve import Answer, Infeasible, Settings, Solver
from .stages import solve_in_stages

SHARES = (1.0, 0.5, 0.25)


def solve_two_stage(solver: Solver, settings: Settings) -> Answer | Infeasible:
    """Return the best answer over the shares of the budget that the first stage may give to what rests in memory."""
    if settings.budget_bytes is None:
        return solver.solve(settings)
    began = time.perf_counter()
    results = []
    for share in SHARES:
        fixed = _first_stage(solver, settings, share * settings.budget_bytes)
        if fixed is not None:
            results.append(solver.solve(replace(settings, restriction=fixed, time_limit_s=settings.time_limit_s / 3)))
    answers = [result for result in results if isinstance(result, Answer)]
    if answers:
        best = min(answers, key=lambda answer: answer.objective_s)
        best.solve_s = time.perf_counter() - began
        return best
    failures = [result for result in results if isinstance(result, Infeasible) and result.smallest is not None]
    if failures:
        return min(failures, key=lambda found: found.smallest.simulation.peak_bytes if found.smallest else 0)
    return Infeasible(("parameters and optimizer states alone",), solver.smallest(settings))


def _first_stage(solver: Solver, settings: Settings, static_bytes: float) -> Restriction | None:
    """Return the fastest sharding whose parameters and states take at most `static_bytes`, as a restriction."""
    problem = solver.problem
    model = Model()
    sharding = add_sharding(model, problem)
    terms = [
        (column, decision.count * (decision.rest_bytes[option] + decision.state_bytes[option]) / 2.0**20)
        for decision in problem.params
        for option, column in enumerate(sharding.choice[decision])
    ]
    model.row("parameters at rest", terms, upper=static_bytes / 2.0**20)
    solution = solve_in_stages(settings.stages(model, sharding))
    if solution.values is None:
        return None
    options = read_choice(solution.values, sharding, None).options
    return Restriction(
        {decision: frozenset([option]) for decision, option in options.items()}, notes=settings.restriction.notes
    )
