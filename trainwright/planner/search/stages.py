"""One solve in stages: the relaxation, then branch and bound on the sharding, with a small MIP of counts at each leaf.

A small model is solved at once, as one MIP. Where the relaxation itself takes too long, known shardings (`starts`) take its
place, and nothing is proven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..model.deadline import LEAST_S, Deadline
from ..model.milp import Model, Patience, Progress, Relaxation, Solution, Vertex
from ..model.outcome import Outcome
from ..model.recompute import Recompute
from ..model.sharding import Sharding
from ..problem.problem import Decision
from ..problem.recipes import Restriction
from .branching import NO_WEIGHT, Branching, connections
from .effort import GAP, Effort

Options = Mapping[Decision, int]
Starts = Callable[[], Sequence[Options]]


@dataclass(eq=False)
class Stages:
    """The state that the stages of one solve share."""

    model: Model
    sharding: Sharding
    restriction: Restriction
    recompute: Recompute | None = None
    starts: Starts | None = None
    """Shardings to begin from, made when they are needed."""
    progress: Progress | None = None
    time_limit_s: float = 30.0
    gap: float = GAP
    effort: Effort = field(default_factory=Effort)
    patience: Patience = Effort.patience
    earlier: np.ndarray | None = None
    """A solution of the same rows under a smaller budget."""
    cutoff: float = math.inf
    """An answer that is not below this is not wanted."""
    floor: float = -math.inf
    """A lower bound on every answer's objective."""
    deadline: Deadline = field(default_factory=Deadline)
    """The deadline of the whole question, which also counts the work."""


def solve_in_stages(stages: Stages, cost: Mapping[int, float] | None = None) -> Solution:
    """Return the best solution found in the time; `cost` replaces the model's objective.

    The outcome is `SLOWER` where the relaxation proves that nothing is below `stages.cutoff`.
    """
    model, limit, deadline = stages.model, stages.time_limit_s, stages.deadline
    began_s = deadline.work_s
    fixed = _forbidden(stages.sharding, stages.restriction) | _fates(stages.recompute, stages.restriction)
    third = stages.effort.relaxation_share * limit
    hidden = stages.sharding.hidden if cost is None else None
    held = _Held(stages, fixed, cost if hidden is None else hidden.priced())
    # where hidden seconds have prices, these are duals of the relaxation
    if hidden is None and (only := _one_sharding(stages.sharding, fixed)) is not None:
        return _of_one(stages, held.solve(only, limit))
    known = None
    if model.num_columns > stages.effort.many_columns and stages.starts is not None:
        known = _in_full(stages, _best_known(stages, held, third), cost)
        if _close(known, stages.floor, stages.patience.gap) and known.objective < stages.cutoff:
            return replace(known, outcome=Outcome.FEASIBLE, bound=stages.floor)
    relaxation, root = _relaxed(held, third if stages.starts else limit, cost)
    if hidden is not None and held.cost is not None:
        known = known and _charged(held.cost, known)
    if root is Outcome.INFEASIBLE:
        return Solution(root, None, math.inf, math.inf)
    bound = max(stages.floor, root.objective) if isinstance(root, Vertex) else stages.floor
    if bound >= stages.cutoff:
        return Solution(Outcome.SLOWER, None, math.inf, bound)
    left = limit - (deadline.work_s - began_s)
    if isinstance(root, Outcome):
        found = known or _best_known(stages, held, left)
    elif model.num_columns - len(fixed) <= stages.effort.few_columns:
        found = _whole(stages, held, root, left)
    else:
        weight = connections(stages.sharding, stages.effort.param_weight)
        branching = Branching(
            relaxation, stages.sharding.choice, frozenset(fixed), weight, held.solve, stages.gap, stages.patience, left,
            stages.cutoff, stages.progress,
            lambda vertex: _among_mixed(stages, held, vertex, stages.effort.mixed_share * left), stages.effort, deadline,
        )  # fmt: skip
        if known is not None and known.objective < stages.cutoff:
            branching.best = known
        if stages.earlier is not None:
            branching.try_options(chosen(stages.sharding, stages.earlier))
        found = branching.search(root)
        if found.values is None and found.outcome is Outcome.STOPPED:
            found = _best_known(stages, held, max(1.0, limit - (deadline.work_s - began_s)))
    bound = max(bound, found.bound if math.isfinite(found.bound) else -math.inf)
    if bound >= stages.cutoff:
        return Solution(Outcome.SLOWER, None, math.inf, bound)
    if found.values is None:
        return Solution(found.outcome, None, math.inf, bound)
    found = _in_full(stages, found, cost)
    outcome = Outcome.OPTIMAL if _close(found, bound, stages.gap) else Outcome.FEASIBLE
    return Solution(outcome, found.values, found.objective, bound)


def relaxed_bound(stages: Stages, cost: Mapping[int, float] | None = None) -> float:
    """Return what the relaxation proves no solution to beat; ∞ where it has none. `cost` replaces the model's objective."""
    fixed = _forbidden(stages.sharding, stages.restriction) | _fates(stages.recompute, stages.restriction)
    _, root = _relaxed(_Held(stages, fixed, cost), stages.time_limit_s, cost)
    if isinstance(root, Outcome):
        return math.inf if root is Outcome.INFEASIBLE else stages.floor
    return max(stages.floor, root.objective)


@dataclass(eq=False)
class _Held:
    """Solves what is left when the sharding is held."""

    stages: Stages
    fixed: Mapping[int, float]
    cost: Mapping[int, float] | None

    def solve(self, options: Options, time_limit_s: float | None = None) -> Solution:
        """Return the best solution with `options`."""
        stages = self.stages
        held = held_at(stages.sharding, options)
        if any(held[column] > 0 for column in self.fixed.keys() & held.keys()):
            return Solution(Outcome.INFEASIBLE, None, math.inf, math.inf)
        return stages.model.solve(
            fixed={**self.fixed, **held},
            cost=self.cost,
            time_limit_s=stages.effort.leaf_share * stages.time_limit_s if time_limit_s is None else time_limit_s,
            gap=stages.gap / 2,
            patience=stages.patience,
            deadline=stages.deadline,
        )


def _relaxed(
    held: _Held, time_limit_s: float, cost: Mapping[int, float] | None = None
) -> tuple[Relaxation, Vertex | Outcome]:
    """Solve the relaxation; unless `cost` replaces the objective, `held` gets the costs by which it weighs what is hidden."""
    stages = held.stages
    relaxation = stages.model.relaxation(held.fixed, cost)
    hidden = stages.sharding.hidden if cost is None else None
    if hidden is not None:
        held.cost = hidden.weighed(relaxation, stages.effort.relaxation_share * stages.time_limit_s, stages.deadline)
    return relaxation, relaxation.solve(time_limit_s=time_limit_s, deadline=stages.deadline)


def _whole(stages: Stages, held: _Held, root: Vertex, time_limit_s: float) -> Solution:
    """Solve everything as one MIP, from the sharding at the relaxation's argmax."""
    first = held.solve(chosen(stages.sharding, root.values))
    if _close(first, root.objective, stages.gap):
        return replace(first, bound=root.objective)
    start = first.values if first.values is not None else stages.earlier
    whole = stages.model.solve(
        fixed=held.fixed, cost=held.cost, start=start, time_limit_s=max(1.0, time_limit_s), gap=stages.gap,
        patience=stages.patience, progress=stages.progress, deadline=stages.deadline, cutoff=stages.cutoff,
    )  # fmt: skip
    return whole if whole.values is not None or first.values is None else replace(first, bound=whole.bound)


def _among_mixed(
    stages: Stages, held: _Held, root: Vertex, time_limit_s: float, first: Solution | None = None
) -> Solution:
    """Return the best solution whose options the relaxation mixes or `first` has; its bound holds for these alone."""
    start = None if first is None else first.values
    unused = {
        column: 0.0
        for columns in stages.sharding.choice.values()
        for column in columns
        if root.values[column] < NO_WEIGHT and (start is None or start[column] < NO_WEIGHT)
    }
    return stages.model.solve(
        fixed={**held.fixed, **unused}, cost=held.cost, start=start, time_limit_s=max(1.0, time_limit_s), gap=stages.gap,
        patience=stages.patience, deadline=stages.deadline, cutoff=stages.cutoff,
    )  # fmt: skip


def solve_beside(stages: Stages, options: Options) -> Solution:
    """Return a solution that is no worse than the best with `options`: among these and what the relaxation mixes."""
    fixed = _forbidden(stages.sharding, stages.restriction) | _fates(stages.recompute, stages.restriction)
    held = _Held(stages, fixed, None)
    deadline = stages.deadline
    began_s = deadline.work_s
    _, root = _relaxed(held, stages.effort.beside_share * stages.time_limit_s)
    first = held.solve(options)
    if isinstance(root, Outcome):
        return _in_full(stages, first)
    found = _among_mixed(stages, held, root, stages.time_limit_s - (deadline.work_s - began_s), first)
    return replace(_in_full(stages, first if found.values is None else found), bound=root.objective)


def _in_full(stages: Stages, found: Solution, cost: Mapping[int, float] | None = None) -> Solution:
    """Return a solution with the seconds that it stands for, where the model's are no more than a bound (`hidden`)."""
    hidden = stages.sharding.hidden
    if hidden is None or cost is not None or found.values is None:
        return found
    return replace(found, objective=hidden.in_full_s(found.values))


def _charged(cost: Mapping[int, float], found: Solution) -> Solution:
    """Return a solution with its objective by other costs than those that it was found with."""
    if found.values is None:
        return found
    return replace(found, objective=sum(each * float(found.values[column]) for column, each in cost.items()))


def _best_known(stages: Stages, held: _Held, time_limit_s: float) -> Solution:
    """Return the best over known shardings: a last resort where the relaxation takes too long."""
    best = Solution(Outcome.STOPPED, None, math.inf, -math.inf)
    known = stages.starts() if stages.starts is not None else ()
    end_s = stages.deadline.work_s + time_limit_s
    for options in known:
        least_s = stages.effort.known_share * stages.time_limit_s if best.values is None else LEAST_S
        found = held.solve(options, max(least_s, end_s - stages.deadline.work_s))
        if found.values is not None and found.objective < best.objective:
            best = replace(found, bound=-math.inf)
    return best


def _close(solution: Solution, bound: float, gap: float) -> bool:
    return solution.values is not None and solution.objective <= bound + gap * abs(bound) + 1e-12


def chosen(sharding: Sharding, values: np.ndarray) -> dict[Decision, int]:
    """Return the option that has most weight, decision by decision."""
    return {decision: int(np.argmax(values[columns])) for decision, columns in sharding.choice.items()}


def held_at(sharding: Sharding, options: Options) -> dict[int, float]:
    """Return the columns of the sharding with the values that they have under `options`."""
    return {
        column: float(option == options[decision])
        for decision, columns in sharding.choice.items()
        for option, column in enumerate(columns)
    }


def _of_one(stages: Stages, found: Solution) -> Solution:
    """Return what was found of the only sharding there is, unless it is proven not to be wanted."""
    bound = max(stages.floor, found.bound) if math.isfinite(found.bound) else stages.floor
    if found.outcome is not Outcome.INFEASIBLE and bound >= stages.cutoff:
        return Solution(Outcome.SLOWER, None, math.inf, bound)
    return replace(found, bound=bound)


def _one_sharding(sharding: Sharding, fixed: Mapping[int, float]) -> Options | None:
    """Return the only sharding whose columns are not held at 0; None where several are left."""
    left = {d: [k for k, column in enumerate(columns) if column not in fixed] for d, columns in sharding.choice.items()}
    return {d: options[0] for d, options in left.items()} if all(len(each) == 1 for each in left.values()) else None


def forbid(model: Model, sharding: Sharding, options: Options) -> None:
    """Add a row that holds for every sharding but one."""
    terms = [(columns[options[decision]], 1.0) for decision, columns in sharding.choice.items()]
    model.row("another sharding", terms, upper=len(terms) - 1)


def _forbidden(sharding: Sharding, restriction: Restriction) -> dict[int, float]:
    """Return the columns of what is not allowed, held at zero."""
    fixed: dict[int, float] = {}
    for decision, options in restriction.allowed.items():
        for option, column in enumerate(sharding.choice[decision]):
            if option not in options:
                fixed[column] = 0.0
    if restriction.forbids is not None:
        for (use, native, want), column in sharding.flow.items():
            if restriction.forbids(use, native, want):
                fixed[column] = 0.0
    if not restriction.share:
        gathered = (column for (_, native, want), column in sharding.shared.items() if native != want[0])
        fixed.update(dict.fromkeys(gathered, 0.0))
    return fixed


def _fates(recompute: Recompute | None, restriction: Restriction) -> dict[int, float]:
    """Return the columns that pinned groups may not use: reruns of what is kept, keeping what is recomputed."""
    fixed: dict[int, float] = {}
    if recompute is None:
        return fixed
    if not restriction.offload:
        away = (*recompute.leaves.values(), *recompute.states.values(), *recompute.params.values())
        fixed.update(dict.fromkeys(away, 0.0))
    if not restriction.leave:
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
    for (use, _), column in recompute.keep_copy.items():
        if column in recompute.leaves and restriction.fates.get(use.source.decision) == "keep":
            fixed[recompute.leaves[column]] = 0.0
    for key, column in recompute.states.items():
        fate = restriction.fates.get(key[0])
        if fate == "state-keep":
            fixed[column] = 0.0
        elif fate == "state-offload":
            fixed[recompute.states_stay[key]] = 0.0
    return fixed


def _pin(fixed: dict[int, float], recompute: Recompute, kept: int, fate: str | None) -> None:
    """Hold the columns of one kind of kept instances at what the fate says: none kept, none leaving, none staying."""
    if fate == "recompute":
        fixed[kept] = 0.0
    elif fate == "keep" and kept in recompute.leaves:
        fixed[recompute.leaves[kept]] = 0.0
    elif fate == "offload" and kept in recompute.leaves:
        fixed[recompute.resident[kept]] = 0.0
