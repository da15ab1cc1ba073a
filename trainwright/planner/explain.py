"""Explains a plan: for every decision the option chosen, its cost, and the best alternative; for stages, their cuts."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..artifacts import Alternative, BreakEven, ExplainedCut, ExplainedDecision, Explanation, Plan, UserError
from ..profiler.saved import record
from ..program.decisions import Decisions
from ..program.groups import is_routed
from ..program.layout import Layout, layout_text
from ..program.plan_text import decisions_of
from ..program.program import Program, Tensor
from ..program.sampling import share_of
from .costs.costs import OptimizerCost, cost_model
from .costs.known_updates import MakeOptimizer
from .model.tied import find_tied
from .pipeline.explain import explain_cuts
from .plan import as_written, task_of
from .problem.build import build_problem
from .problem.problem import Decision, Problem, Use, Want


def explain(
    plan: Plan,
    program: Program,
    key: str | None,
    optimizer_cost: OptimizerCost,
    make_optimizer: MakeOptimizer | None = None,
) -> Explanation:
    """Explain a plan, or the decisions that `key` (a key of the plan, a module path, a parameter, a glob) names.

    With `key` and `make_optimizer`, the best other option of the first few decisions is simulated and priced as `check` does
    an edited plan; without, it is estimated by the sum of its parts.
    """
    if plan.compile is not None:
        raise UserError(
            "a plan that is not compiled is needed to explain its decisions one by one; in this one, torch's partitioner decides "
            "what each block keeps; see the plan's `compile`, or plan without --compile"
        )
    device = plan.cluster.device
    axes = plan.inner_cluster.mesh(tuple(plan.inner_mesh.values()))
    records, share = record(program, device.kind), max(plan.sampled.values(), default=0.0)
    costs_at = lambda imbalance: cost_model(program, device, axes, records, optimizer_cost.num_passes, imbalance, share)  # noqa: E731
    problem = build_problem(program, costs_at(plan.imbalance), optimizer_cost)
    decisions = decisions_of(program, plan)
    options = {decision: _add_chosen(decision, decisions) for decision in problem.decisions}
    readers = _Edges(problem, options, decisions.shared)
    picked = [decision for decision in problem.decisions if key is None or _names(decision, key)]
    if not picked:
        known = ", ".join([*plan.modules, *plan.params][:8])
        raise UserError(
            f"{key!r} names nothing in the plan; it has {known}, …; give one of these, a module's path or a pattern"
        )
    rows = [_row(plan, readers, decision, options) for decision in picked if options[decision] >= 0]
    if any(_routed_options(decision, problem) for decision in picked):
        ends = [build_problem(program, costs_at(imbalance), optimizer_cost) for imbalance in (1.0, _UNEVEN)]
        even_at = _BreakEvens(readers, problem, ends)
        rows = [replace(row, even_at=even_at.of(row.key)) for row in rows]
    if key is not None and make_optimizer is not None:
        trial = _Trial(plan, program, optimizer_cost, make_optimizer)
        rows = [*map(trial.simulated, rows[:_SIMULATED]), *rows[_SIMULATED:]]
    return Explanation(plan, tuple(rows), _cuts(plan, program, decisions, optimizer_cost, make_optimizer))


def _cuts(
    plan: Plan,
    program: Program,
    decisions: Decisions,
    optimizer_cost: OptimizerCost,
    make_optimizer: MakeOptimizer | None,
) -> tuple[ExplainedCut, ...]:
    """Return why stages begin where they do; nothing where there are none."""
    if plan.pipeline is None or make_optimizer is None:
        return ()
    (place,) = task_of(plan, program, optimizer_cost, make_optimizer).places
    return explain_cuts(plan, place, decisions)


_UNEVEN = 2.0
"""The second imbalance, beside 1, at which options are priced to see how their seconds grow with it."""


def _routed_options(decision: Decision, problem: Problem) -> list[int]:
    """Return the options under which the number of a rank's rows depends on the data."""
    group, mesh = decision.group, problem.costs.mesh
    if group is None:
        return []
    return [k for k, split in enumerate(decision.options) if is_routed(group, split, mesh)]


class _BreakEvens:
    """Finds the imbalance at which the best option of routed rows takes as long as the best one of known rows."""

    def __init__(self, edges: _Edges, problem: Problem, ends: Sequence[Problem]) -> None:
        self.edges = edges
        self.decisions = {decision.key: decision for decision in problem.decisions if decision.group is not None}
        self.problem = problem
        self.ends = [{each.key: each for each in other.decisions} for other in ends]

    def of(self, key: str) -> BreakEven | None:
        """Return where the decision `key` has its break-even; None for one without options of both kinds."""
        decision = self.decisions.get(key)
        routed = [] if decision is None else _routed_options(decision, self.problem)
        if decision is None or not routed:
            return None
        known = [k for k in range(len(decision.options)) if k not in routed and self._line(decision, k)[0] < math.inf]
        routed = [k for k in routed if self._line(decision, k)[0] < math.inf]
        if not known or not routed:
            return None
        steady = min(known, key=lambda k: self._line(decision, k)[0])
        bar_s = self._line(decision, steady)[0]
        found = max((self._reaches(decision, k, bar_s), k) for k in routed)
        return BreakEven(found[0], _option(decision, found[1]), _option(decision, steady))

    def _line(self, decision: Decision, option: int) -> tuple[float, float]:
        """Return an option's seconds under even routing, and by how many they grow for each unit of imbalance."""
        around = self.edges.seconds(decision, option)
        even_s, more_s = (end[decision.key].option_s(option) for end in self.ends)
        return even_s + around, (more_s - even_s) / (_UNEVEN - 1.0)

    def _reaches(self, decision: Decision, option: int, bar_s: float) -> float:
        even_s, growth = self._line(decision, option)
        return 1.0 + (bar_s - even_s) / growth if growth > 0 else (math.inf if even_s < bar_s else 0.0)


_SIMULATED = 6
"""The number of alternatives that are simulated; each takes as long as `check` without the capture."""


class _Trial:
    """Simulates a plan with one decision changed, all others as they are."""

    def __init__(
        self, plan: Plan, program: Program, optimizer_cost: OptimizerCost, make_optimizer: MakeOptimizer
    ) -> None:
        self.plan, self.program = plan, program
        self.task = task_of(plan, program, optimizer_cost, make_optimizer)

    def simulated(self, row: ExplainedDecision) -> ExplainedDecision:
        """Return the row with its alternative's own step and peak."""
        if row.alternative is None or row.key not in self._section(row.is_param):
            return row
        return replace(row, alternative=self._run(row, row.alternative))

    def _section(self, is_param: bool) -> Mapping[str, Any]:
        return self.plan.params if is_param else self.plan.modules

    def _run(self, row: ExplainedDecision, other: Alternative) -> Alternative:
        try:
            predicted, _, _ = as_written(self._edited(row, other), self.task)
        except UserError as error:
            return replace(other, refused=str(error))
        return replace(other, step_s=predicted.step_s, peak_bytes=predicted.peak_bytes)

    def _edited(self, row: ExplainedDecision, other: Alternative) -> Plan:
        name, field = ("params", "layout") if row.is_param else ("modules", "split")
        section = self._section(row.is_param)
        entry = section[row.key].model_copy(
            update={field: other.option, **({} if row.is_param else {"sampled": other.sampled})}
        )
        return self.plan.model_copy(update={name: {**section, row.key: entry}})


def _add_chosen(decision: Decision, decisions: Decisions) -> int:
    """Return the index of the plan's option; -1 where a plan edited by hand has one that the solver does not offer."""
    own = decisions.splits[decision.group] if decision.group is not None else decisions.params[decision.tied[0]]
    return decision.options.index(own) if own in decision.options else -1


def _names(decision: Decision, key: str) -> bool:
    names = {decision.key, *(tensor.key for tensor in decision.tied)}
    if decision.region_class is not None and decision.group is not None:
        for member in decision.region_class.members:
            names |= {member.ops[op.position].key for op in decision.group.ops}
    return any(
        fnmatch.fnmatchcase(name, glob) or name.startswith((f"{key}:", f"{key}."))
        for name in names
        for glob in (key, f"*.{key}")
    )


class _Edges:
    """Computes the seconds of the reshards around a decision."""

    def __init__(
        self, problem: Problem, options: dict[Decision, int], shared: Collection[tuple[Tensor, Layout]]
    ) -> None:
        self.problem, self.options, self.shared = problem, options, shared
        self.tied = {use: tied for tied in find_tied(problem) for use in tied.uses}
        self.around: dict[Decision, list[Use]] = {}
        for use in problem.uses:
            readers = self.tied[use].uses if use in self.tied else [use]
            for decision in {use.source.decision, *(demand.decision for one in readers for demand in one.demands)}:
                self.around.setdefault(decision, []).append(use)

    def seconds(self, decision: Decision, option: int) -> float:
        """Return the seconds of the reshards around `decision` under `option`; infinite where one is impossible."""
        return sum(self._use_s(use, decision, option) for use in self.around.get(decision, []))

    def _use_s(self, use: Use, changed: Decision, option: int) -> float:
        def of(decision: Decision) -> int:
            return option if decision is changed else max(0, self.options[decision])

        native = use.source.natives[of(use.source.decision)]
        total = 0.0
        for want in {want for demand in use.demands for want in demand.wants[of(demand.decision)]}:
            gradient = want[1] if use.tensor.requires_grad else native
            times = self.problem.costs.edge_s(use.source.tensor, native, want[0], gradient)
            total += self._num_paid(use, native, want, of) * sum(times) if times is not None else float("inf")
        return total

    def _num_paid(self, use: Use, native: Layout, want: Want, of: Callable[[Decision], int]) -> int:
        """Return how many copies serve a want for the regions of `use`.

        Where one copy serves all uses of tied parameters, the first use that asks pays for it and the others do not.
        """
        one_copy = native == want[0] or (use.source.tensor, want[0]) in self.shared
        if use not in self.tied or not one_copy:
            return use.count
        asking = (one for one in self.tied[use].uses if any(want in d.wants[of(d.decision)] for d in one.demands))
        return int(next(asking) is use)


def _row(plan: Plan, edges: _Edges, decision: Decision, options: dict[Decision, int]) -> ExplainedDecision:
    chosen = options[decision]
    totals = [decision.option_s(k) + edges.seconds(decision, k) for k in range(len(decision.options))]
    others = [k for k in range(len(totals)) if k != chosen and totals[k] < float("inf")]
    best = min(others, key=lambda k: totals[k], default=None)
    return ExplainedDecision(
        key=decision.key,
        is_param=decision.group is None,
        option=_option(decision, chosen),
        compute_s=decision.count * (decision.forward_s[chosen] + decision.backward_s[chosen]),
        comm_s=edges.seconds(decision, chosen) + decision.count * sum(decision.inner_comm_s[chosen]),
        saved_bytes=_bytes(edges.problem, decision, chosen),
        recomputed=_fate(plan, decision, "recomputed"),
        offloaded=_fate(plan, decision, "offloaded"),
        alternative=None if best is None else _alternative(decision, best, totals[best] - totals[chosen]),
        sampled=_share(decision, chosen),
        variance=_variance(edges.problem, decision, chosen),
    )


def _alternative(decision: Decision, option: int, extra_s: float) -> Alternative:
    return Alternative(_option(decision, option), extra_s, sampled=_share(decision, option))


def _share(decision: Decision, option: int) -> float:
    return 0.0 if decision.group is None else share_of(decision.options[option])


def _variance(problem: Problem, decision: Decision, option: int) -> float:
    if decision.group is None or not _share(decision, option):
        return 0.0
    return problem.costs.variance_bound(decision.group, decision.options[option])


def _option(decision: Decision, option: int) -> tuple[str, ...]:
    split: Sequence[int] = decision.options[option]
    if decision.group is None:
        return tuple(layout_text(tuple(split), decision.tied[0].slots))
    return tuple(decision.group.loops[loop].name if loop >= 0 else "-" for loop in split)


def _bytes(problem: Problem, decision: Decision, option: int) -> int:
    if decision.group is None:
        return decision.resting_bytes(option)
    total = decision.inner_bytes[option]
    for stored in problem.stored:
        if stored.source.decision is decision:
            total += problem.costs.local_bytes(stored.source.tensor, stored.source.natives[option])
    return decision.count * total


def _fate(plan: Plan, decision: Decision, fate: str) -> str:
    section: Mapping[str, Any] = plan.params if decision.group is None else plan.modules
    values = getattr(section.get(decision.key), fate, {})
    return "; ".join(f"{name}: {blocks}" for name, blocks in values.items())
