"""One solve in stages: LP → the sharding by argmax → MIP over the LP's support → MIP of everything, from the best so far.

The relaxation's bound is weak where memory binds, but the sharding is nearly always among the options that it gives any
weight: a MIP of those alone takes a fraction of the whole one's time. Where the relaxation itself takes too long,
shardings that are known to be good (`starts`) take its place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .milp import Model, Patience, Progress, Solution
from .problem import Decision
from .recipes import Restriction
from .recompute import Recompute
from .sharding import Sharding

GAP = 1e-3
PATIENCE = Patience(2.0, 5e-3)
"""A binding budget can take minutes to the last thousandth."""
Options = Mapping[Decision, int]
CUT_OFF = "another mesh has a faster answer"
"""The status of a solve that was given up."""
_SUPPORT = 1e-6
_FEW_COLUMNS = 3000
"""A MIP of so many is solved whole at once."""


@dataclass(eq=False)
class Stages:
    """What the stages of one solve share."""

    model: Model
    sharding: Sharding
    restriction: Restriction
    recompute: Recompute | None = None
    starts: Callable[[], Sequence[Options]] | None = None
    """Shardings to begin from, made when they are needed."""
    progress: Progress | None = None
    time_limit_s: float = 30.0
    gap: float = GAP
    patience: Patience = PATIENCE
    earlier: np.ndarray | None = None
    """A solution of the same rows under a smaller budget."""
    cutoff: float = math.inf
    """An answer that is not below this is not wanted."""


def solve_in_stages(stages: Stages, cost: Mapping[int, float] | None = None) -> Solution:
    """Return the best solution found in the time; `cost` replaces the model's objective.

    The status is `CUT_OFF` where the relaxation proves that nothing is below `stages.cutoff`.
    """
    began = time.perf_counter()
    model, limit = stages.model, stages.time_limit_s
    fixed = _forbidden(stages.sharding, stages.restriction) | _fates(stages.recompute, stages.restriction)
    relaxed = model.solve(relaxed=True, fixed=fixed, cost=cost, time_limit_s=limit / 3 if stages.starts else limit)
    if relaxed.status == "infeasible":
        return relaxed
    bound = relaxed.objective if relaxed.values is not None else -math.inf
    if bound >= stages.cutoff:
        return Solution(CUT_OFF, None, math.inf, bound, time.perf_counter() - began)
    first = _first(stages, relaxed, fixed, cost, bound)
    if _close(first, bound, stages.gap) or relaxed.values is None:
        status = "optimal" if _close(first, bound, stages.gap) else first.status.replace("optimal", "feasible")
        return Solution(status, first.values, first.objective, bound, time.perf_counter() - began)
    remaining = max(1.0, limit - (time.perf_counter() - began))
    whole = model.solve(
        fixed=fixed,
        cost=cost,
        start=first.values,
        time_limit_s=remaining,
        gap=stages.gap,
        patience=stages.patience,
        progress=stages.progress,
    )
    found = whole if whole.values is not None and whole.objective <= first.objective else first
    if found.values is None:
        return Solution(whole.status, None, math.inf, bound, time.perf_counter() - began)
    bound = max(bound, whole.bound if math.isfinite(whole.bound) else -math.inf)
    status = "optimal" if _close(found, bound, stages.gap) else "feasible"
    return Solution(status, found.values, found.objective, bound, time.perf_counter() - began)


def _close(solution: Solution, bound: float, gap: float) -> bool:
    return solution.values is not None and solution.objective <= bound + gap * abs(bound) + 1e-12


def _first(
    stages: Stages, relaxed: Solution, fixed: Mapping[int, float], cost: Mapping[int, float] | None, bound: float
) -> Solution:
    """The best MIP solution of a few small parts of the problem; without values where none of them has any."""
    best = Solution("stopped", None, math.inf, bound, 0.0)
    for held in _parts(stages, relaxed, fixed):
        found = stages.model.solve(
            fixed={**fixed, **held},
            cost=cost,
            start=best.values if best.values is not None else stages.earlier,
            time_limit_s=stages.time_limit_s / 4,
            gap=stages.gap,
            patience=stages.patience,
        )
        if found.values is not None and found.objective < best.objective:
            best = found
        if _close(best, bound, stages.gap):
            break
    return best


def _parts(stages: Stages, relaxed: Solution, fixed: Mapping[int, float]) -> Iterator[dict[int, float]]:
    """Columns to hold: the sharding at the relaxation's argmax; all options at zero that it gives no weight; known ones."""
    choice = stages.sharding.choice
    if relaxed.values is not None:
        values = relaxed.values
        argmax = {decision: int(np.argmax(values[columns])) for decision, columns in choice.items()}
        yield held_at(stages.sharding, argmax)
        if stages.model.num_columns - len(fixed) > _FEW_COLUMNS:
            yield {column: 0.0 for columns in choice.values() for column in columns if values[column] < _SUPPORT}
    for options in stages.starts() if stages.starts is not None else ():
        yield held_at(stages.sharding, options)


def held_at(sharding: Sharding, options: Options) -> dict[int, float]:
    """Return the columns of the sharding with the values that they have under `options`."""
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
    if recompute is None:
        return fixed
    if not restriction.offload:
        fixed.update(dict.fromkeys(recompute.leaves.values(), 0.0))
    for (decision, _), column in recompute.rerun.items():
        if restriction.fates.get(decision) in ("keep", "offload"):
            fixed[column] = 0.0
    for (decision, _), column in recompute.keep_inner.items():
        _pin(fixed, recompute, column, restriction.fates.get(decision))
    for (stored, _), column in recompute.keep.items():
        fate = restriction.fates.get(stored.source.decision)
        if not stored.held and not (stored.boundary and fate == "recompute"):
            _pin(fixed, recompute, column, fate)
    return fixed


def _pin(fixed: dict[int, float], recompute: Recompute, kept: int, fate: str | None) -> None:
    """Hold the columns of one kind of kept instances at what the fate says: none kept, none leaving, none staying."""
    if fate == "recompute":
        fixed[kept] = 0.0
    elif fate == "keep" and kept in recompute.leaves:
        fixed[recompute.leaves[kept]] = 0.0
    elif fate == "offload" and kept in recompute.leaves:
        fixed[recompute.resident[kept]] = 0.0
