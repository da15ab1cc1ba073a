"""`explain`: for every decision of a plan what was chosen, what it costs, what else there was, and what binds."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..artifacts import Plan, UserError
from ..capture.decide import decisions_of
from ..capture.layout import Layout, layout_text
from ..capture.local import Decisions
from ..capture.program import Program, Tensor
from ..profiler.saved import record
from .build import build_problem
from .costs import OptimizerCost, cost_model
from .problem import Decision, Problem, Use, Want
from .tied import find_tied


@dataclass(frozen=True)
class Row:
    """Why one decision is as it is. Seconds are per step, over all blocks."""

    key: str
    chosen: str
    compute_s: float
    comm_s: float
    """Its own conversions and those of its readers."""
    saved_bytes: int
    """What it would keep for the backward, were everything kept; parameters: bytes at rest with states."""
    recomputed: str
    """Which blocks rederive what it leaves."""
    offloaded: str
    """Which blocks keep it off the device; of a parameter, its optimizer state."""
    next_best: str
    """The best other option while all other decisions stay; empty: there is none."""
    next_best_extra_s: float


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`, as rows and as text."""

    rows: tuple[Row, ...]
    header: tuple[str, ...]

    def text(self) -> str:
        """Return the explanation for the terminal."""
        return "\n".join([*self.header, *(_row_text(row) for row in self.rows)])


def explain(plan: Plan, program: Program, key: str | None, optimizer_cost: OptimizerCost) -> Explanation:
    """Explain a plan, or the decisions that `key` (a key of the plan, a module path, a parameter, a glob) names.

    The next best option is the cheapest one with all other decisions held: what changing this one alone would cost in
    time. It may be free, or even gain time, where memory is what stands against it.
    """
    device = plan.cluster.device
    axes = plan.cluster.mesh(tuple(plan.mesh.values()))
    costs = cost_model(program, device, axes, record(program, device.kind), optimizer_cost.num_passes)
    problem = build_problem(program, costs, optimizer_cost)
    decisions = decisions_of(program, plan)
    options = {decision: _add_chosen(decision, decisions) for decision in problem.decisions}
    readers = _Edges(problem, options, decisions.shared)
    picked = [decision for decision in problem.decisions if key is None or _names(decision, key)]
    if not picked:
        known = ", ".join([*plan.modules, *plan.params][:8])
        raise UserError(f"something in the plan is needed; {key!r} names nothing; there are {known}, …")
    rows = [_row(plan, readers, decision, options) for decision in picked if options[decision] >= 0]
    return Explanation(tuple(rows), tuple(_header(plan)))


def _add_chosen(decision: Decision, decisions: Decisions) -> int:
    """The index of the plan's option; -1 when the plan, edited by hand, has one that the solver does not offer."""
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
    """The seconds of the layout changes around a decision."""

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
        """Return what the edges of `decision` would take under `option`; infinite where one is impossible."""
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
        """How often a want is served for the regions of `use`: where one copy serves all, once for the first use that asks."""
        one_copy = native == want[0] or (use.source.tensor, want[0]) in self.shared
        if use not in self.tied or not one_copy:
            return use.count
        asking = (one for one in self.tied[use].uses if any(want in d.wants[of(d.decision)] for d in one.demands))
        return int(next(asking) is use)


def _row(plan: Plan, edges: _Edges, decision: Decision, options: dict[Decision, int]) -> Row:
    chosen = options[decision]
    totals = [decision.option_s(k) + edges.seconds(decision, k) for k in range(len(decision.options))]
    others = [k for k in range(len(totals)) if k != chosen and totals[k] < float("inf")]
    best = min(others, key=lambda k: totals[k], default=None)
    return Row(
        decision.key,
        _option_text(decision, chosen),
        decision.count * (decision.forward_s[chosen] + decision.backward_s[chosen]),
        edges.seconds(decision, chosen) + decision.count * sum(decision.inner_comm_s[chosen]),
        _bytes(edges.problem, decision, chosen),
        _fate(plan, decision, "recomputed"),
        _fate(plan, decision, "offloaded"),
        _option_text(decision, best) if best is not None else "",
        totals[best] - totals[chosen] if best is not None else 0.0,
    )


def _option_text(decision: Decision, option: int) -> str:
    split: Sequence[int] = decision.options[option]
    if decision.group is None:
        return " ".join(layout_text(tuple(split), decision.tied[0].slots))
    return " ".join(decision.group.loops[loop].name if loop >= 0 else "-" for loop in split)


def _bytes(problem: Problem, decision: Decision, option: int) -> int:
    if decision.group is None:
        return decision.count * (decision.rest_bytes[option] + decision.state_bytes[option])
    total = decision.inner_bytes[option]
    for stored in problem.stored:
        if stored.source.decision is decision:
            total += problem.costs.local_bytes(stored.source.tensor, stored.source.natives[option])
    return decision.count * total


def _fate(plan: Plan, decision: Decision, fate: str) -> str:
    section: Mapping[str, Any] = plan.params if decision.group is None else plan.modules
    values = getattr(section.get(decision.key), fate, {})
    return "; ".join(f"{name}: {blocks}" for name, blocks in values.items())


def _header(plan: Plan) -> list[str]:
    found = plan.predicted
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
    runs = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    lines = [
        f"{plan.solver.name} on {plan.cluster.name}, mesh {mesh}{runs}",
        f"step {_ms(found.step_s)}: compute {_ms(found.compute_s)}, communication {_ms(found.comm_s)}, "
        f"recomputation {_ms(found.recompute_s)}",
        f"peak {found.peak_bytes / 2**20:.1f} MiB"
        + ("" if plan.budget_bytes is None else f" of {plan.budget_bytes / 2**20:.1f} MiB"),
    ]
    if plan.offload is not None:
        states = (
            f" and {found.moved_state_bytes / 2**20:.1f} MiB of optimizer states" if found.moved_state_bytes else ""
        )
        lines.append(
            f"offloaded {found.moved_bytes / 2**20:.1f} MiB{states} to the {plan.offload.tier}, "
            f"{_ms(found.transfer_s)} of it not beside computations"
        )
    if plan.budget_bytes is not None:
        spare = 1 - found.peak_bytes / plan.budget_bytes
        binds = spare < 0.05 and (found.recompute_s > 0 or plan.solver.name in ("joint", "two-stage", "fsdp"))
        lines.append("memory binds: more of it would save time" if binds else "memory does not bind")
    return lines


def _row_text(row: Row) -> str:
    seconds = f"compute {_ms(row.compute_s)}, communication {_ms(row.comm_s)}"
    text = f"{row.key}: {row.chosen}  ({seconds}, {row.saved_bytes / 2**20:.1f} MiB)"
    if row.recomputed:
        text += f"; recomputed {row.recomputed}"
    if row.offloaded:
        text += f"; offloaded {row.offloaded}"
    if row.next_best:
        word = "slower" if row.next_best_extra_s >= 0 else "faster, but it does not fit"
        text += f"; next best {row.next_best}, {_ms(abs(row.next_best_extra_s))} {word}"
    return text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
