"""Plans, reports and clusters as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from ..artifacts import Cluster, Plan, Refusal, Report
from .decisions import (
    DecisionRow,
    budget_text,
    compiled_rows,
    decision_rows,
    disk_rows,
    least_text,
    micro_batches_text,
    offloaded_bytes,
)
from .splits import legend
from .stages import bubble_text, stage_headers, stage_rows
from .text import Grid, note_lines, plain_table, rendered, title_line
from .units import category_name, format_bytes, format_count, format_flops, format_ratio, format_s

__all__ = ["cluster_table", "compare_table", "left_out_lines", "plan_table", "report_table", "rows_table"]


def plan_table(plan: Plan) -> str:
    """Return the prediction and the decisions of a plan."""
    mesh = " × ".join(f"{name} {size}" for name, size in plan.mesh.items())
    title = title_line(plan.model.name, f"on {plan.cluster.name}", f"mesh {mesh}", *micro_batches_text(plan),
                       plan.optimizer, plan.dtype)  # fmt: skip
    names = [Text(f"{name:6} {text}", style="dim") for name, text in legend(plan)]
    decisions = _decision_table(decision_rows(plan))
    return rendered(title, _prediction_of(plan), *_stage_table(plan), decisions, *names, *note_lines(plan.notes))


def _stage_table(plan: Plan) -> list[Grid | Text]:
    """The stages, of a plan that has some."""
    if plan.pipeline is None or not plan.predicted.stages:
        return []
    table = plain_table(*stage_headers(plan), left=2, drop=("update", "reruns", "busy", "in flight"))
    for row in stage_rows(plan):
        table.add_row(*row)
    return [Text(""), table, Text(bubble_text(plan), style="dim")]


def compare_table(plans: Mapping[str, Plan | Refusal]) -> str:
    """Return what each recipe reaches, one row a recipe; marked are the fastest that fits, and what the device cannot hold."""
    table = plain_table("", "step", "compute", "comm exposed", "recompute", "peak", "fits in", "planned in", "",
                        drop=("planned in", "compute", "recompute", "comm exposed", "fits in"))  # fmt: skip
    found = [each for each in plans.values() if isinstance(each, Plan)]
    fastest = min((plan.predicted.step_s for plan in found if plan.fits_device), default=None)
    for name, plan in plans.items():
        if isinstance(plan, Plan):
            table.add_row(*_compared(name, plan, fastest))
        else:
            table.add_row(name, *["–"] * 7, Text("does not fit", style="red"))
    refused = [(name, found) for name, found in plans.items() if isinstance(found, Refusal)]
    return rendered(table, *(Text(f"{name} does not fit: {found}") for name, found in refused))


def report_table(report: Report) -> str:
    """Return *predicted against measured*, and whether the plan computes what one process computes."""
    verdict = "verified" if report.passed else "NOT the same as one process"
    style = "bold green" if report.passed else "bold red"
    title = Text(f"{verdict}: {report.num_ranks} ranks against one process, in {report.dtype}", style=style)
    return rendered(title, _error_table(report), _measured_table(report), *note_lines(report.notes))


def cluster_table(cluster: Cluster) -> str:
    """Return the devices and links of a cluster."""
    device, table = cluster.device, plain_table("", "rate", "")
    table.add_row("devices", str(cluster.num_devices), device.name)
    table.add_row("memory each", format_bytes(device.memory_bytes), "")
    for dtype, rate in device.flops_per_s.items():
        table.add_row(f"matmul {dtype}", f"{format_flops(rate)}/s", "")
    for dtype, rate in device.conv_flops_per_s.items():
        table.add_row(f"convolution {dtype}", f"{format_flops(rate)}/s", "")
    table.add_row("memory bandwidth", f"{format_bytes(device.bandwidth_bytes_per_s)}/s", "")
    table.add_row("smallest op", format_s(device.launch_s), "")
    for place, tier in cluster.offload.items():
        rates = f"{format_bytes(tier.write_bytes_per_s)}/s out, {format_bytes(tier.read_bytes_per_s)}/s back"
        table.add_row(f"offload to {place}", rates, f"{100 * tier.overlap:.0f} % overlaps computation")
    for link in cluster.links:
        speed = f"{format_bytes(link.bandwidth_bytes_per_s)}/s"
        table.add_row(f"link {link.name}", speed, f"{link.size} sharing, {format_s(link.latency_s)} a hop")
    for phase, factor in cluster.device.factors.items():
        table.add_row(f"learned: {phase}", f"× {factor:.3g}", _learned_from(cluster))
    return rendered(title_line(cluster.name, cluster.source), table)


def _learned_from(cluster: Cluster) -> str:
    """The runs that a correction comes from, with what they had been told and what they took."""
    return ", ".join(
        f"{run.model}: {format_s(run.predicted_s['step'])} predicted, {format_s(run.measured_s['step'])} measured"
        for run in cluster.learned
    )


def left_out_lines(found: Sequence[Any]) -> list[str]:
    """Return, a line a run, how far its step was off before and with what the other runs teach."""
    return [
        f"{each.model}: {100 * each.error_before:+.1f} % off as it was predicted, {100 * each.error_after:+.1f} % with what the "
        "other runs teach"
        for each in found
    ]


def rows_table(rows: Iterable[Mapping[str, Any]], drop: Sequence[str] = ()) -> str:
    """Return rows of the same keys as a table; numbers stand to the right.

    drop: the keys whose columns are left out where the terminal is too narrow, in this order.
    """
    rows = list(rows)
    if not rows:
        return "none"
    numbers = [key for key in rows[0] if all(_is_number(row[key]) or row[key] is None for row in rows)]
    titles = {key: key.replace("num_params", "parameters").replace("_", " ") for key in rows[0]}
    table = plain_table(*titles.values(), right=[titles[key] for key in numbers], drop=[titles[key] for key in drop])
    for row in rows:
        table.add_row(*(_cell(key, value) for key, value in row.items()))
    return rendered(table)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    return format_count(value) if key == "num_params" else str(value)


def _prediction_of(plan: Plan) -> Grid:
    predicted, solver = plan.predicted, plan.solver
    table = plain_table("prediction", "", "", header=False)
    parts = [("compute", predicted.compute_s), ("communication exposed", predicted.exposed_comm_s)]
    parts += [("recomputation", predicted.recompute_s), ("transfers", predicted.transfer_s)]
    parts += [("waiting for other stages", predicted.bubble_s)]
    spent = ", ".join(f"{name} {format_s(seconds)}" for name, seconds in parts if seconds)
    table.add_row("step", Text(format_s(predicted.step_s), style="bold"), spent)
    budget = budget_text(plan)
    if not plan.fits_device:
        budget += f", a device has {format_bytes(plan.cluster.device.memory_bytes)}"
    over = not plan.fits_device or (plan.budget_bytes is not None and predicted.peak_bytes > plan.budget_bytes)
    peak = Text(format_bytes(predicted.peak_bytes), style="bold red" if over else "bold")
    verdict = f"{budget}: does NOT fit" if over else budget
    table.add_row("peak per device", peak, "; ".join(filter(None, (verdict, _largest(predicted.breakdown)))))
    for each in plan.shapes:
        shown = ", ".join(name + " " + "×".join(map(str, shape)) for name, shape in each.batch.items())
        table.add_row("another shape", format_s(each.step_s), f"peak {format_bytes(each.peak_bytes)}: {shown}")
    for name, num_bytes in predicted.comm_bytes.items():
        table.add_row(name, format_bytes(num_bytes), "sent by each rank in a step")
    if plan.offload is not None:
        beside = f"to the {plan.offload.tier} and back; {format_s(predicted.transfer_s)} not overlapped by computation"
        for what, num_bytes in offloaded_bytes(plan):
            table.add_row(what, format_bytes(num_bytes), beside)
    for row in (*disk_rows(plan), *compiled_rows(plan)):
        table.add_row(*row)
    table.add_row("solver", solver.name, f"{plan.verdict}; planned in {format_s(solver.plan_s)}")
    return table


def _largest(breakdown: Mapping[str, int]) -> str:
    ordered = sorted(breakdown.items(), key=lambda item: -item[1])
    return ", ".join(f"{category_name(name)} {format_bytes(num_bytes)}" for name, num_bytes in ordered if num_bytes)


def _decision_table(rows: list[DecisionRow]) -> Grid:
    table = plain_table("op", "split", "parameters at rest", "what the backward needs", left=4)
    block = None
    for row in rows:
        if row.block != block and row.block:
            table.add_row(Text(row.block, style="bold"))
        block = row.block
        label = ("  " if row.block else "") + row.label
        table.add_row(Text(label), Text(row.split), Text("\n".join(row.params)), Text(row.fate))
    return table


def _compared(name: str, plan: Plan, fastest: float | None) -> list[Text]:
    predicted = plan.predicted
    times = (predicted.step_s, predicted.compute_s, predicted.exposed_comm_s, predicted.recompute_s)
    best = predicted.step_s == fastest and plan.fits_device
    style = "bold green" if best else "" if plan.fits_device else "red"
    peak = (format_bytes(predicted.peak_bytes), least_text(predicted))
    cells = [name, *map(format_s, times), *peak, format_s(plan.solver.plan_s)]
    return [Text(cell, style=style) for cell in (*cells, _remark(plan, fastest, best))]


def _remark(plan: Plan, fastest: float | None, best: bool) -> str:
    if not plan.fits_device:
        return f"does NOT fit: a device has {format_bytes(plan.cluster.device.memory_bytes)}"
    return "fastest" if best else format_ratio(plan.predicted.step_s, fastest)


def _error_table(report: Report) -> Grid:
    table = plain_table("", "largest relative difference", "allowed", "")
    for what, error, bar, worst in report.differences:
        table.add_row(what, f"{error:.1e}", f"{bar:.1e}", Text(worst))
    return table


def _measured_table(report: Report) -> Grid:
    table = plain_table("", "predicted", "measured", "difference", "")
    for rank, (predicted, peak) in enumerate(zip(report.predicted_peaks, report.peak_bytes)):
        over = report.budget_bytes is not None and peak > report.budget_bytes
        room = "" if report.budget_bytes is None else f"budget {format_bytes(report.budget_bytes)}"
        room += ": EXCEEDED" if over else ""
        cells = (format_bytes(predicted), format_bytes(peak), format_ratio(peak, predicted))
        table.add_row(f"peak, rank {rank}", *cells, Text(room, style="red" if over else ""))
    for rank, (routed, peak) in enumerate(zip(report.routed_peak_bytes, report.peak_bytes)):
        cells = (format_bytes(routed), format_bytes(peak), format_ratio(peak, routed))
        table.add_row(
            f"peak, rank {rank}", *cells, f"for its rows, up to {report.expert_imbalance:.3g} × the even share"
        )
    if report.step_s is not None:
        predicted_s, step_s = report.predicted_step_s, report.step_s
        table.add_row("step", format_s(predicted_s), format_s(step_s), format_ratio(step_s, predicted_s), "")
    return table
