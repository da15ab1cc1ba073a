"""The decisions of a plan as rows: one an op, with its parameters and the fate of what its backward needs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..artifacts import OpPlan, ParamPlan, Plan, Predicted
from .units import format_bytes, format_bytes_up, format_s

WHOLE = "-"
_MAX_LISTED = 4


@dataclass(frozen=True)
class DecisionRow:
    """One op of a plan; `block` is what is repeated (`transformer.h.{0-11}`), empty outside of blocks."""

    key: str
    block: str
    label: str
    split: str
    params: tuple[str, ...]
    fate: str


def decision_rows(plan: Plan) -> list[DecisionRow]:
    """Return the plan's ops in its order, blocks together, and in each the parameters that belong to no op of it."""
    params = _params_by_module(plan)
    rows = []
    for key, op in plan.modules.items():
        path = key.rpartition(":")[0]
        fate = fate_text(op) if plan.compile is None else "the compiler's choice"
        rows.append(_row(key, split_text(plan, op), tuple(params.pop(path, ())), fate))
    rows += [_row(path, "", tuple(texts), "") for path, texts in params.items()]
    first = {row.block: place for place, row in reversed(list(enumerate(rows))) if row.block}
    order = [first.get(row.block, place) for place, row in enumerate(rows)]
    return [rows[place] for place in sorted(range(len(rows)), key=lambda place: order[place])]


def split_text(plan: Plan, op: OpPlan) -> str:
    """Return which loop each mesh axis splits: `batch@node out@gpu`, or `whole`."""
    split = [f"{loop}@{axis}" for axis, loop in zip(plan.inner_mesh, op.split) if loop != WHOLE]
    return " ".join(split) or "whole"


def micro_batches_text(plan: Plan) -> tuple[str, ...]:
    """Return how many micro-batches a step takes, and chunks its loss; nothing for one of each."""
    runs = () if plan.micro_batches == 1 else (f"{plan.micro_batches} micro-batches",)
    return (*runs, f"loss in {plan.loss_chunks} chunks") if plan.loss_chunks else runs


def offloaded_bytes(plan: Plan) -> list[tuple[str, int]]:
    """Return what leaves the device in a step and comes back, with its bytes; that of which there is none is left out.

    States on disks are among what `disk_rows` says. Of a plan with stages it is what a device of the stage offloads that does most.
    """
    predicted = plan.predicted
    moved = max((stage.moved_bytes for stage in predicted.stages), default=predicted.moved_bytes)
    found = [("offloaded", moved), ("optimizer states", predicted.moved_state_bytes)]
    return [(what, num_bytes) for what, num_bytes in found if num_bytes]


def budget_text(plan: Plan) -> str:
    """Return the budget of a plan, and the smallest one that holds it: its peak and a reserve, for the peak itself is refused."""
    budget = f"of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes is not None else "no budget"
    return f"{budget} ({least_text(plan.predicted)} would do)" if plan.predicted.fits_in_bytes else budget


def least_text(predicted: Predicted) -> str:
    """Return the smallest budget that holds a plan, not rounded down; `–` where it is not known."""
    return format_bytes_up(predicted.fits_in_bytes) if predicted.fits_in_bytes else "–"


def disk_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return what a tier reads and writes in a step, each with what it means; nothing where the plan was made without one."""
    tier = plan.tier
    if tier is None:
        return []
    window = f"{format_bytes(tier.keep_bytes)} stay in memory, {format_bytes(tier.held_bytes)} come and go at most"
    if tier.place == "host":
        there = f"{window}; {format_bytes(tier.host_bytes)} in the host's memory"
        return [
            ("read from the host", f"{format_bytes(tier.read_bytes)} a step", there),
            ("written to the host", f"{format_bytes(tier.written_bytes)} a step", f"of {format_s(tier.step_s)}"),
        ]
    return [
        ("read from disks", f"{format_bytes(tier.read_bytes)} a step", f"{window}; {format_bytes(tier.disk_bytes)} on the disks"),
        (
            "written to disks", f"{format_bytes(tier.written_bytes)} a step",
            f"{format_bytes(tier.written_a_day)} a day, at {format_s(tier.step_s)} a step: drives wear out by it",
        ),
    ]  # fmt: skip


def compiled_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return what blocks that torch compiles keep for the backward, a row for those alike; nothing for a plan without any."""
    if plan.compile is None:
        return []
    alike = [
        (key, "all" if blocks == "all" else f"blocks {blocks}", share)
        for key, shares in plan.compile.items()
        for share, blocks in shares.items()
    ]
    rows = [
        ("compiled", f"keeps {float(share):.0%}", f"of what the compiler would: {key}, {blocks}")
        for key, blocks, share in alike
    ]
    return rows or [("compiled", "keeps 100%", "of what the compiler chooses, in all blocks")]


def layout_text(plan: Plan, param: ParamPlan) -> str:
    """Return a parameter's layout at rest, and what of it is offloaded: `S0@gpu, state offloaded`, or `replicated`."""
    sharded = [f"{place}@{axis}" for axis, place in zip(plan.inner_mesh, param.layout) if place != "R"]
    once = ["gathered once for all readers"] if param.shared else []
    return ", ".join([" ".join(sharded) or "replicated", *once, *_away(param)])


def _away(param: ParamPlan) -> list[str]:
    """What of a parameter's is off the device between updates: `state offloaded in 0-5`."""
    parts = param.offloaded.items()
    return [f"{what} offloaded" + ("" if blocks == "all" else f" in {blocks}") for what, blocks in parts]


def fate_text(op: OpPlan) -> str:
    """Return what is recomputed or offloaded, with the blocks where not all: `out recomputed 0-5`."""
    parts = []
    for fate, chosen in (("recomputed", op.recomputed), ("offloaded", op.offloaded)):
        by_blocks: dict[str, list[str]] = defaultdict(list)
        for name, blocks in chosen.items():
            by_blocks[blocks].append(name)
        for blocks, names in by_blocks.items():
            parts.append(f"{_listed(names)} {fate}" + ("" if blocks == "all" else f" in {blocks}"))
    if op.sampled:
        parts.insert(0, f"{op.sampled:.3g} of its rows kept: its weight's gradient is an estimate")
    return "; ".join(parts) or "kept"


def _listed(names: list[str]) -> str:
    """The first few values; one of an op that was fused into this one goes by that op's last name."""
    short = [name.rpartition(":")[2] for name in names]
    if len(short) <= _MAX_LISTED:
        return ", ".join(short)
    return f"{', '.join(short[: _MAX_LISTED - 1])} and {len(short) - _MAX_LISTED + 1} more"


def _params_by_module(plan: Plan) -> dict[str, list[str]]:
    params: dict[str, list[str]] = defaultdict(list)
    for name, param in plan.params.items():
        path, _, last = name.rpartition(".")
        params[path].append(f"{last} {layout_text(plan, param)}")
    return dict(params)


def _row(key: str, split: str, params: tuple[str, ...], fate: str) -> DecisionRow:
    block = key[: key.rindex("}") + 1] if "}" in key else ""
    label = key[len(block) :].lstrip(".") if block else key
    return DecisionRow(key, block, label, split, params, fate)
