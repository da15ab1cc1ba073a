"""One solve in stages: LP → the sharding by argmax → MIP for the rest → MIP of everything, from the best so far.

The relaxation's bound is weak where memory binds, but its sharding is nearly always right. Where the relaxation itself
takes too long, shardings that are known to be good (`starts`) take its place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .milp import Model, Progress, Solution
from .problem import Decision
from .recipes import Restriction
from .recompute import Recompute
from .sharding import Sharding

GAP = 1e-3
Options = Mapping[Decision, int]


@dataclass(eq=False)
class Stages:
    """What the stages of one solve share."""

    model: Model
    sharding: Sharding
    restriction: Restriction
    recompute: Recompute | None = None
    starts: Sequence[Options] = ()
    progress: Progress | None = None
    time_limit_s: float = 30.0
    gap: float = GAP


def solve_in_stages(stages: Stages, cost: Mapping[int, float] | None = None) -> Solution:
    """Return the best solution found in the time; `cost` replaces the model's objective."""
    began = time.perf_counter()
    model, limit = stages.model, stages.time_limit_s
    fixed = _forbidden(stages.sharding, stages.restriction) | _fates(stages.recompute, stages.restriction)
    relaxed = model.solve(relaxed=True, fixed=fixed, cost=cost, time_limit_s=limit / 3 if stages.starts else limit)
    if relaxed.status == "infeasible":
        return relaxed
    bound = relaxed.objective if relaxed.values is not None else -math.inf
    first = _best_start(stages, relaxed, fixed, cost, bound)
    if relaxed.values is None or _close(first, bound, stages.gap):
        status = "optimal" if _close(first, bound, stages.gap) else first.status.replace("optimal", "feasible")
        return Solution(status, first.values, first.objective, bound, time.perf_counter() - began)
    remaining = max(1.0, limit - (time.perf_counter() - began))
    whole = model.solve(
        fixed=fixed, cost=cost, start=first.values, time_limit_s=remaining, gap=stages.gap, progress=stages.progress
    )
    chosen = whole if whole.values is not None and whole.objective <= first.objective else first
    status = (
        whole.status if chosen is whole or whole.values is not None else first.status.replace("optimal", "feasible")
    )
    if chosen.values is None:
        return Solution(whole.status, None, math.inf, bound, time.perf_counter() - began)
    bound = max(bound, whole.bound if math.isfinite(whole.bound) else -math.inf)
    return Solution(status, chosen.values, chosen.objective, bound, time.perf_counter() - began)


def _close(solution: Solution, bound: float, gap: float) -> bool:
    return solution.values is not None and solution.objective <= bound + gap * abs(bound) + 1e-12


def _best_start(
    stages: Stages, relaxed: Solution, fixed: Mapping[int, float], cost: Mapping[int, float] | None, bound: float
) -> Solution:
    """The best MIP solution with the sharding held at the relaxation's, or at one of the known ones."""
    best = Solution("stopped", None, math.inf, bound, 0.0)
    for held in _shardings(stages, relaxed):
        limit = stages.time_limit_s / 4
        found = stages.model.solve(fixed={**fixed, **held}, cost=cost, time_limit_s=limit, gap=stages.gap)
        if found.values is not None and found.objective < best.objective:
            best = found
        if _close(best, bound, 5 * stages.gap):
            break
    return best


def _shardings(stages: Stages, relaxed: Solution) -> Iterator[dict[int, float]]:
    """Column values of whole shardings: the relaxation's argmax, then the known ones."""
    choice = stages.sharding.choice
    if relaxed.values is not None:
        values: np.ndarray = relaxed.values
        yield _held(
            stages.sharding, {decision: int(np.argmax(values[columns])) for decision, columns in choice.items()}
        )
    for options in stages.starts:
        yield _held(stages.sharding, options)


def _held(sharding: Sharding, options: Options) -> dict[int, float]:
    return {
        column: float(option == options[decision])
        for decision, columns in sharding.choice.items()
        for option, column in enumerate(columns)
    }


def _forbidden(sharding: Sharding, restriction: Restriction) -> dict[int, float]:
    """The columns of what is not allowed, held at zero."""
    fixed: dict[int, float] = {}
    for decision, options in restriction.allowed.items():
        for option, column in enumerate(sharding.choice[decision]):
            if option not in options:
                fixed[column] = 0.0
    if restriction.forbids is not None:
        for (use, native, want), column in sharding.flow.items():
            if restriction.forbids(use, native, want):
                fixed[column] = 0.0
    return fixed


def _fates(recompute: Recompute | None, restriction: Restriction) -> dict[int, float]:
    """The columns that pinned groups may not use: reruns of what is kept, keeping what is recomputed."""
    fixed: dict[int, float] = {}
    if recompute is None or not restriction.fates:
        return fixed
    for (decision, _), column in recompute.rerun.items():
        if restriction.fates.get(decision) is False:
            fixed[column] = 0.0
    for (decision, _), column in recompute.keep_inner.items():
        if restriction.fates.get(decision) is True:
            fixed[column] = 0.0
    for (stored, _), column in recompute.keep.items():
        free = not stored.boundary and not stored.held
        if free and restriction.fates.get(stored.source.decision) is True:
            fixed[column] = 0.0
    return fixed
