"""`explain` for the terminal: the plan in three lines, then each decision with what it costs and what else there was."""

from __future__ import annotations

import math

from ..artifacts import Alternative, BreakEven, ExplainedDecision, Explanation, Plan
from .decisions import micro_batches_text, offloaded_bytes
from .splits import layout_meaning, meaning_of
from .stages import bubble_text
from .units import format_bytes, format_ratio, format_s

_WHOLE = {"-", "R"}


def explanation_text(found: Explanation) -> str:
    """Return the three lines that answer, and two or three for each decision."""
    return "\n".join(
        [*_answer(found), *_cuts(found), *(line for row in found.rows for line in ("", *_decision(found.plan, row)))]
    )


def decision_reason(plan: Plan, row: ExplainedDecision) -> str:
    """Return in one line what a decision costs, and what the best other option would.

    >>> from trainwright.artifacts import ExplainedDecision
    >>> row = ExplainedDecision("h:linear", False, ("b0",), 0.002, 0.001, 4096, "", "", None)
    >>> decision_reason(None, row)
    '2 ms of compute, 1 ms of changes of layout, 4 KiB for the backward if kept'
    """
    if row.alternative is None:
        return _costs(row)
    other = row.alternative
    return f"{_costs(row)}; next best {_other(plan, row, other)}: {_alternative(plan, other)}"


def _answer(found: Explanation) -> list[str]:
    plan, predicted = found.plan, found.plan.predicted
    mesh = " × ".join(f"{name} {size}" for name, size in plan.mesh.items())
    where = ", ".join([f"mesh {mesh}", *micro_batches_text(plan)])
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    return [
        f"{plan.model.name} by {plan.solver.name} on {plan.cluster.name} ({where}): {format_s(predicted.step_s)} a step, "
        f"{format_bytes(predicted.peak_bytes)}{budget} a device; {plan.verdict}",
        f"time    {_shares(plan)}",
        f"memory  {_memory(found)}",
    ]


def _cuts(found: Explanation) -> list[str]:
    """Where stages begin, and what the next best place would cost."""
    if found.plan.pipeline is None:
        return []
    depths = ", ".join(map(str, found.plan.pipeline.in_flight))
    lines = [f"stages  {found.plan.num_stages}, with {depths} forwards in flight; {bubble_text(found.plan)}"]
    for cut in found.cuts:
        if cut.other is None or cut.extra_s is None:
            why = (
                f"none of {cut.num_tried} other places near fits"
                if cut.num_tried
                else "there is no other place between its neighbours"
            )
        else:
            more = (
                "as long"
                if cut.extra_s == 0
                else f"{format_s(abs(cut.extra_s))} {'longer' if cut.extra_s > 0 else 'shorter'}"
            )
            why = f"next best {cut.other}: a simulated step {more}, with what each stage reruns chosen anew"
        lines.append(f"        stage {cut.stage} begins at {cut.begins}; {why}")
    return lines


def _shares(plan: Plan) -> str:
    predicted = plan.predicted
    hidden = predicted.comm_s - predicted.exposed_comm_s
    parts = [
        ("compute", predicted.compute_s),
        ("communication that nothing hides", predicted.exposed_comm_s),
        *_paid(plan),
        ("of waiting for other stages", predicted.bubble_s),
    ]
    told = ", ".join(f"{format_s(value)} {name}" for name, value in parts if value > 0)
    return told + (f"; {format_s(hidden)} of communication runs beside it" if hidden > 0 else "")


def _paid(plan: Plan) -> list[tuple[str, float]]:
    """The seconds that a step pays to hold less."""
    predicted = plan.predicted
    return [
        ("recomputation", predicted.recompute_s),
        ("transfers that nothing hides", predicted.transfer_s),
    ]


def _memory(found: Explanation) -> str:
    """Say whether memory stands against a shorter step, by what is paid for it and by the options that were tried."""
    plan = found.plan
    if plan.budget_bytes is None:
        return f"no budget{_away(plan)}"
    paid = [f"{format_s(seconds)} {name}" for name, seconds in _paid(plan) if seconds > 0]
    barred = [row.key for row in found.rows if row.alternative is not None and _is_barred(plan, row.alternative)]
    left = f"{format_bytes(plan.budget_bytes - plan.predicted.peak_bytes)} of the budget left{_away(plan)}"
    if paid:
        return f"binds: a step pays {' and '.join(paid)} to stay within the budget; {left}"
    if barred:
        return f"binds: another option for {barred[0]} is faster and does not fit; {left}"
    return f"no time is paid for it; {left}"


def _away(plan: Plan) -> str:
    """What a step moves off the device and back, and where to."""
    if plan.offload is None:
        return ""
    moved = ", ".join(f"{what} {format_bytes(num_bytes)}" for what, num_bytes in offloaded_bytes(plan))
    return f"; to the {plan.offload.tier} and back: {moved}"


def _is_barred(plan: Plan, other: Alternative) -> bool:
    """Whether an option is faster, and more than the budget allows."""
    if other.step_s is None or other.peak_bytes is None or plan.budget_bytes is None:
        return False
    return other.step_s < plan.predicted.step_s and other.peak_bytes > plan.budget_bytes


def _decision(plan: Plan, row: ExplainedDecision) -> list[str]:
    lines = [row.key, f"  {_chosen(plan, row)}; {_costs(row)}"]
    for fate, blocks in (("recomputed", row.recomputed), ("offloaded", row.offloaded)):
        if blocks:
            lines.append(f"  {fate}  {blocks}")
    if row.sampled:
        lines.append(
            f"  sampled  {row.sampled:.3g} of the rows are kept: the gradient of the weight is an unbiased estimate, with a "
            f"variance of at most {row.variance:.3g} · Σ‖g‖²‖x‖²"
        )
    if row.alternative is not None:
        lines.append(f"  next best  {_other(plan, row, row.alternative)}: {_alternative(plan, row.alternative)}")
    if row.even_at is not None:
        lines.append(f"  imbalance  {_even_at(plan, row.even_at)}")
    return lines


def _even_at(plan: Plan, even: BreakEven) -> str:
    """Say which split is faster on which side; a factor below 1, or above the ranks that share the experts, cannot be."""
    below, above = (
        " ".join(f"{name}@{axis}" for name, axis in zip(split, plan.inner_mesh)) for split in (even.below, even.above)
    )
    most = math.prod(size for name, size in zip(even.below, plan.inner_mesh.values()) if "e" in name.split("+"))
    if even.imbalance < 1.0:
        return f"{above} is faster than {below} however even the routing is, by the sum of their parts"
    if even.imbalance >= most:
        return f"{below} is faster than {above} however skewed the routing is, by the sum of their parts"
    share = f"{even.imbalance:.3g} × its even share"
    return f"{below} is faster than {above} while no rank has more than {share}, by the sum of their parts"


def _chosen(plan: Plan, row: ExplainedDecision) -> str:
    return f"{'at rest' if row.is_param else 'split'} {_option(plan, row, row.option)}"


def _other(plan: Plan, row: ExplainedDecision, other: Alternative) -> str:
    """Write the best other option, with its form where the two forms of a linear map are at hand."""
    written = _option(plan, row, other.option)
    if other.sampled:
        return f"{written}, sampled {other.sampled:.3g}"
    return f"{written}, exact" if row.sampled else written


def _option(plan: Plan, row: ExplainedDecision, option: tuple[str, ...]) -> str:
    """Write an option with its meaning: `b0@gpu (the batch)`."""
    split = [(name, axis) for name, axis in zip(option, plan.inner_mesh) if name not in _WHOLE]
    if not split:
        return "replicated" if row.is_param else "whole on every rank"
    op = row.key.rpartition(":")[2].split("#")[0]
    meanings = [layout_meaning(name) if row.is_param else meaning_of(name, op) for name, _ in split]
    return f"{' '.join(f'{name}@{axis}' for name, axis in split)} ({'; '.join(dict.fromkeys(meanings))})"


def _costs(row: ExplainedDecision) -> str:
    compute = f"{format_s(row.compute_s)} {'of update' if row.is_param else 'of compute'}"
    kept = f"{format_bytes(row.saved_bytes)} {'with its states' if row.is_param else 'for the backward if kept'}"
    return f"{compute}, {format_s(row.comm_s)} of changes of layout, {kept}"


def _alternative(plan: Plan, other: Alternative) -> str:
    if other.refused:
        return f"cannot run while the other decisions stay: {other.refused}"
    if other.step_s is None or other.peak_bytes is None:
        more = "longer" if other.estimated_extra_s >= 0 else "shorter"
        return (
            f"{format_s(abs(other.estimated_extra_s))} {more} by the sum of its parts, which knows neither overlap nor memory "
            "(explain its key to have it simulated)"
        )
    fits = plan.budget_bytes is None or other.peak_bytes <= plan.budget_bytes
    change = format_ratio(other.step_s, plan.predicted.step_s)
    verdict = "" if fits else ", which does not fit"
    return f"{format_s(other.step_s)} a step ({change}), {format_bytes(other.peak_bytes)} a device{verdict}"
