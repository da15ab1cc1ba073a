"""What `print(plan)` and its like show: the few lines that matter, made without the decisions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..artifacts import Cluster, Plan, Profile, Report
from .decisions import compiled_rows, disk_rows, micro_batches_text, offloaded_bytes
from .units import format_bytes, format_count, format_flops, format_ratio, format_s

__all__ = ["as_html", "as_line", "as_text", "rows_of"]

Summary = tuple[str, list[tuple[str, str]]]
"""A title, and rows of a name and a value."""


def as_text(artifact: Plan | Profile | Cluster | Report) -> str:
    """Return the artifact in at most ten lines."""
    title, rows = rows_of(artifact)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows)])


def as_line(artifact: Plan | Profile | Cluster | Report) -> str:
    """Return the artifact in one line, for lists and debuggers."""
    title, rows = rows_of(artifact)
    return f"<{type(artifact).__name__} {title}: {', '.join(f'{name} {value}' for name, value in rows[:2])}>"


def as_html(artifact: Plan | Profile | Cluster | Report) -> str:
    """Return the artifact as a small table, for notebooks."""
    title, rows = rows_of(artifact)
    cells = "".join(f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in rows)
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"


def rows_of(artifact: Plan | Profile | Cluster | Report) -> Summary:
    """Return the title and the rows of a summary."""
    if isinstance(artifact, Plan):
        return _of_plan(artifact)
    if isinstance(artifact, Profile):
        return _of_profile(artifact)
    return _of_cluster(artifact) if isinstance(artifact, Cluster) else _of_report(artifact)


def _of_plan(plan: Plan) -> Summary:
    predicted, budget = plan.predicted, plan.budget_bytes
    mesh = " × ".join(f"{name} {size}" for name, size in plan.mesh.items())
    over = budget is not None and predicted.peak_bytes > budget
    of = "no budget" if budget is None else f"of {format_bytes(budget)}{': does NOT fit' if over else ''}"
    parts = [("compute", predicted.compute_s), ("communication exposed", predicted.exposed_comm_s)]
    parts += [("recomputation", predicted.recompute_s), ("transfers", predicted.transfer_s)]
    parts += [("waiting for other stages", predicted.bubble_s)]
    spent = ", ".join(f"{name} {format_s(seconds)}" for name, seconds in parts if seconds)
    gap = f", at most {100 * plan.solver.gap:.2g} % from the optimum" if plan.solver.gap else ""
    return f"{plan.model.name} on {plan.cluster.name}", [
        ("step", f"{format_s(predicted.step_s)} ({spent})"),
        ("peak", f"{format_bytes(predicted.peak_bytes)} a device, {of}"),
        ("mesh", ", ".join((mesh, *micro_batches_text(plan)))),
        ("trained in", f"{plan.dtype}{f', autocast {plan.autocast}' if plan.autocast else ''}, with {plan.optimizer}"),
        *((what, f"{format_bytes(size)} a step") for what, size in offloaded_bytes(plan)),
        *((what, f"{size}; {meaning}") for what, size, meaning in (*disk_rows(plan), *compiled_rows(plan))),
        ("found by", f"{plan.solver.name}: {plan.solver.status}{gap}"),
        ("decisions", f"{len(plan.modules)} ops and {len(plan.params)} parameters; plan.table() lists them"),
    ]


def _of_profile(profile: Profile) -> Summary:
    step = [("step", f"{format_s(profile.step_s)}, predicted for one device")] if profile.step_s is not None else []
    return f"{profile.model} on {profile.target}", [
        ("peak", f"{format_bytes(profile.peak_bytes)} in one step"),
        *step,
        ("saved", f"{format_bytes(profile.saved_bytes)} for the backward"),
        ("parameters", f"{format_count(profile.num_params)}, {format_bytes(profile.param_bytes)}"),
        ("optimizer", f"{profile.optimizer}, {format_bytes(profile.optimizer_bytes)}"),
        ("work", f"{format_flops(profile.forward_flops + profile.backward_flops)} forward and backward"),
        ("modules", f"{len(profile.modules)}; profile.table() lists them"),
    ]


def _of_cluster(cluster: Cluster) -> Summary:
    device = cluster.device
    rates = ", ".join(f"{name} {format_flops(rate)}/s" for name, rate in device.flops_per_s.items())
    links = ", ".join(f"{link.name} {format_bytes(link.bandwidth_bytes_per_s)}/s" for link in cluster.links)
    rows = [
        ("devices", f"{cluster.num_devices} × {device.name}, {format_bytes(device.memory_bytes)} each"),
        ("matmul", rates),
        ("memory", f"{format_bytes(device.bandwidth_bytes_per_s)}/s"),
        ("links", links),
        ("offload", ", ".join(cluster.offload)),
        ("source", cluster.source),
    ]
    return cluster.name, [row for row in rows if row[1]]


def _of_report(report: Report) -> Summary:
    verdict = "verified" if report.passed else "NOT the same as one process"
    peaks: Sequence[int] = report.peak_bytes
    rows = [
        ("loss", f"differs by {report.max_relative_error_loss:.1e}, {report.bar_loss:.1e} allowed"),
        ("gradients", f"differ by {report.max_relative_error_gradient:.1e}, {report.bar_gradient:.1e} allowed"),
    ]
    if peaks:
        ratio = format_ratio(max(peaks), report.predicted_peak_bytes)
        rows.append(
            (
                "peak",
                f"{format_bytes(max(peaks))}, {ratio} from the predicted {format_bytes(report.predicted_peak_bytes)}",
            )
        )
    if report.routed_peak_bytes:
        ratio = format_ratio(max(peaks), max(report.routed_peak_bytes))
        rows.append(("experts", f"peak {ratio} from that of the rows sent, up to {report.expert_imbalance:.3g} × even"))
    if report.budget_bytes is not None:
        rows.append(("budget", format_bytes(report.budget_bytes)))
    return f"{verdict}: {report.num_ranks} ranks against one process, in {report.dtype}", rows
