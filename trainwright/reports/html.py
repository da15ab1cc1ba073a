"""Plans as HTML files that stand alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Protocol

from ..artifacts import Explanation, MemoryPoint, Plan, Profile, Refusal, Report
from ..artifacts.record import write_atomically
from .decisions import (
    DecisionRow,
    budget_text,
    decision_rows,
    disk_rows,
    least_text,
    micro_batches_text,
    offloaded_bytes,
)
from .explanation import decision_reason
from .frontier_figure import frontier_figure
from .memory_figures import breakdown_figure
from .module_figures import modules_figure
from .page import Page, Tile, best_mark, folded, grid, notes, table
from .recipe_figures import measured_figure, peaks_figure, step_times_figure
from .sections import memory_section, notes_section
from .splits import legend
from .stages import (
    ShownSchedule,
    bubble_text,
    schedule_figure,
    stage_headers,
    stage_memory_figure,
    stage_rows,
)
from .units import format_bytes, format_ratio, format_s

__all__ = ["write_plan"]


class Simulated(Protocol):
    """What a report reads of the planner's simulation."""

    timeline: Sequence[MemoryPoint]
    breakdown: Mapping[str, int]
    peak_bytes: int


def write_plan(
    plan: Plan,
    path: str | os.PathLike[str],
    simulation: Simulated | None = None,
    comparison: Mapping[str, Plan | Refusal] | None = None,
    profile: Profile | None = None,
    report: Report | None = None,
    explanation: Explanation | None = None,
    frontier: Sequence[Plan] = (),
    files: Sequence[str] = (),
    schedule: ShownSchedule | None = None,
) -> None:
    """Write a plan as a page: prediction, decisions, and of the rest what is given.

    simulation: the memory over the step. comparison: the recipes side by side. profile: the modules by size.
    report: predicted against measured. explanation: the reason beside each decision. frontier: time against memory;
    files: where its plans were written, in order. schedule: who does what when, of a plan with stages.
    """
    mesh = " × ".join(f"{name} {size}" for name, size in plan.mesh.items())
    parts = (f"on {plan.cluster.name}", f"mesh {mesh}", *micro_batches_text(plan), plan.optimizer, plan.dtype)
    subtitle = " · ".join(parts)
    page = Page(plan.model.name, subtitle, _plan_tiles(plan, report))
    if report is not None:
        _measured_section(page, report)
    _stages_section(page, plan, schedule)
    if simulation is not None and simulation.timeline:
        memory_section(page, simulation.timeline, simulation.peak_bytes, plan.budget_bytes)
    _where_section(page, plan, profile)
    if comparison:
        _comparison_section(page, comparison, plan.budget_bytes)
    if frontier:
        _frontier_section(page, plan, frontier, files)
    _decisions_section(page, plan, _reasons(plan, explanation))
    notes_section(page, (*plan.notes, *plan.solver.notes))
    page.section("How it was made", _made_table(plan))
    write_atomically(Path(path), page.html())


# Headers


def _plan_tiles(plan: Plan, report: Report | None) -> list[Tile]:
    predicted, budget = plan.predicted, plan.budget_bytes
    step = Tile("step, predicted", format_s(predicted.step_s), f"compute {format_s(predicted.compute_s)}")
    share = predicted.peak_bytes / budget if budget else None
    peak = Tile(
        "peak per device",
        format_bytes(predicted.peak_bytes),
        budget_text(plan),
        share,
        bad=share is not None and share > 1,
    )
    tiles = [
        step,
        peak,
        Tile("communication", format_s(predicted.comm_s), f"{format_s(predicted.exposed_comm_s)} exposed"),
        Tile("recomputation", format_s(predicted.recompute_s), "a step"),
        *_offload_tiles(plan),
        *(Tile(*row) for row in disk_rows(plan)),
        Tile("solver", plan.solver.name, f"{plan.verdict}; {format_s(plan.solver.plan_s)}"),
    ]
    if report is not None:
        verdict = "same maths" if report.passed else "differs"
        error = f"as one process: gradients within {report.max_relative_error_gradient:.0e}"
        tiles.append(Tile("verified", verdict, error, bad=not report.passed))
    return tiles


def _offload_tiles(plan: Plan) -> list[Tile]:
    if plan.offload is None:
        return []
    exposed = f"to the {plan.offload.tier} and back, {format_s(plan.predicted.transfer_s)} exposed"
    return [Tile(what, format_bytes(num_bytes), exposed) for what, num_bytes in offloaded_bytes(plan)]


# Sections


def _stages_section(page: Page, plan: Plan, schedule: ShownSchedule | None) -> None:
    """The stages of a plan that has some: the step as it is simulated, a row a stage, memory against the budget."""
    if plan.pipeline is None or not plan.predicted.stages:
        return
    parts = [] if schedule is None else [page.chart(schedule_figure(schedule), "who does what when")]
    rows = [[escape(cell) for cell in row] for row in stage_rows(plan)]
    headers = stage_headers(plan)
    parts.append(table(headers, rows, numbers=range(2, len(headers))))
    parts.append(page.chart(stage_memory_figure(plan), "memory of each stage at its peak, and the budget"))
    lead = f"What each stage does when; numbers are micro-batches, and what is empty is waiting: {bubble_text(plan)}."
    page.section("Stages", *parts, lead=lead)


def _where_section(page: Page, plan: Plan, profile: Profile | None) -> None:
    parts = []
    if plan.predicted.breakdown:
        parts.append(page.chart(breakdown_figure(plan.predicted.breakdown), "memory at the peak, by category"))
    if profile is not None and profile.modules:
        parts.append(page.chart(modules_figure(profile.modules), "modules by size"))
    if parts:
        beside = "; beside it the modules, on one device." if len(parts) > 1 else "."
        lead = f"What is alive at the peak, on the rank that holds most{beside}"
        page.section("Where it goes", grid(*parts), lead=lead)


def _comparison_section(page: Page, plans: Mapping[str, Plan | Refusal], budget_bytes: int | None) -> None:
    charts = grid(
        page.chart(step_times_figure(plans), "step time of each recipe"),
        page.chart(peaks_figure(plans, budget_bytes), "peak of each recipe"),
    )
    refused = [(name, found) for name, found in plans.items() if not isinstance(found, Plan)]
    reasons = notes(f"{name}: {found}" for name, found in refused)
    lead = "All priced by the same simulator; hatched: does not fit."
    card = f'<div class="card">{_comparison_table(plans)}</div>'
    page.section("The recipes side by side", card, charts, reasons, lead=lead)


def _comparison_table(plans: Mapping[str, Plan | Refusal]) -> str:
    """The numbers of each recipe, the fastest marked."""
    fastest = min((found.predicted.step_s for found in plans.values() if isinstance(found, Plan)), default=None)
    rows = []
    for name, found in plans.items():
        if isinstance(found, Plan):
            predicted = found.predicted
            times = (predicted.step_s, predicted.compute_s, predicted.exposed_comm_s, predicted.recompute_s)
            cells = [
                escape(name),
                *map(format_s, times),
                format_bytes(predicted.peak_bytes),
                least_text(predicted),
                format_s(found.solver.plan_s),
            ]
            best = predicted.step_s == fastest
            rows.append([*cells, best_mark("fastest") if best else format_ratio(predicted.step_s, fastest)])
        else:
            rows.append([escape(name), *["–"] * 7, '<span class="wrong">does not fit</span>'])
    columns = ("recipe", "step", "compute", "comm exposed", "recompute", "peak", "fits in", "planned in", "")
    return table(columns, rows, numbers=range(1, 9))


def _frontier_section(page: Page, plan: Plan, points: Sequence[Plan], files: Sequence[str]) -> None:
    chart = page.chart(frontier_figure(points, plan, files), "step time against memory")
    fastest = min(point.predicted.step_s for point in points)
    rows = []
    for point, file in zip_longest(points, files, fillvalue=""):
        assert isinstance(point, Plan)
        found = point.predicted
        times = (found.step_s, found.compute_s, found.exposed_comm_s, found.recompute_s)
        slower = best_mark("fastest") if found.step_s == fastest else format_ratio(found.step_s, fastest)
        mesh = " × ".join(map(str, point.mesh.values()))
        rows.append(
            (f"<code>{escape(str(file))}</code>", format_bytes(found.peak_bytes), *map(format_s, times), mesh, slower)
        )
    columns = ("plan", "peak", "step", "compute", "comm exposed", "recompute", "mesh", "")
    card = f'<div class="card">{table(columns, rows, numbers=range(1, 8))}</div>'
    page.section("Time against memory", chart, card, lead="Each corner is a plan: no other is both smaller and faster.")


def _measured_section(page: Page, report: Report) -> None:
    parts = [_measured_table(report)]
    if report.peak_bytes:
        parts.append(page.chart(measured_figure(report), "measured and predicted peak of each rank"))
    lead = (
        f"{report.num_ranks} ranks against one process, in {report.dtype}; peaks from the allocator's own records over "
        "two whole steps."
    )
    page.section("Predicted against measured", grid(*(f'<div class="card">{parts[0]}</div>', *parts[1:])), lead=lead)


def _measured_table(report: Report) -> str:
    def verdict(is_good: bool) -> str:
        return '<span class="good">within</span>' if is_good else '<span class="wrong">beyond</span>'

    rows = [
        (what, f"{error:.1e}", f"{bar:.1e}", verdict(report.passed or error <= bar))
        for what, error, bar, _ in report.differences
    ]
    if report.peak_bytes:
        peak = max(report.peak_bytes)
        allowed = report.budget_bytes if report.budget_bytes is not None else report.predicted_peak_bytes
        judged = verdict(peak <= allowed) if report.budget_bytes is not None else ""
        rows.append(("peak, largest rank", format_bytes(peak), format_bytes(allowed), judged))
    if report.routed_peak_bytes:
        again = f"{format_bytes(max(report.routed_peak_bytes))} predicted"
        ratio = format_ratio(max(report.peak_bytes), max(report.routed_peak_bytes))
        rows.append(("peak, for the rows that were sent", format_bytes(max(report.peak_bytes)), again, ratio))
    if report.step_s is not None:
        ratio = format_ratio(report.step_s, report.predicted_step_s)
        rows.append(("step", format_s(report.step_s), f"{format_s(report.predicted_step_s)} predicted", ratio))
    worst = f'<p class="why">Worst gradient: <code>{escape(report.worst_gradient)}</code></p>'
    return table(("", "measured", "allowed", ""), rows, numbers=(1, 2, 3)) + (worst if report.worst_gradient else "")


def _decisions_section(page: Page, plan: Plan, reasons: Mapping[str, str]) -> None:
    parts = []
    for block, group in groupby(decision_rows(plan), key=lambda row: row.block):
        rows = list(group)
        summary = f"<code>{escape(block)}</code>" if block else escape("outside of the blocks")
        parts.append(folded(f"{summary}<small>{len(rows)} ops</small>", _decision_table(rows, reasons), is_open=True))
    lead = (
        "For each op: what each mesh axis splits, how its parameters are stored between steps, and what becomes of the "
        "values that its backward needs. Repeated blocks are written once."
    )
    names = [(f'<span class="chip">{escape(name)}</span>', escape(text)) for name, text in legend(plan)]
    page.section(
        "Decisions", folded("What the short names mean", table(("", ""), names), is_open=True), *parts, lead=lead
    )


def _decision_table(rows: Sequence[DecisionRow], reasons: Mapping[str, str]) -> str:
    columns = ["op", "split", "parameters at rest", "what the backward needs"]
    cells = []
    for row in rows:
        params = "<br>".join(f"<code>{escape(param)}</code>" for param in row.params)
        fate = f'<span class="{"whole" if row.fate == "kept" else "fate"}">{escape(row.fate)}</span>'
        cells.append([f'<code class="op">{escape(row.label)}</code>', _chips(row.split), params, fate])
    return table(columns, cells, remarks=[escape(reasons.get(row.key, "")) for row in rows])


def _chips(split: str) -> str:
    if "@" not in split:
        return f'<span class="whole">{escape(split)}</span>'
    return "".join(f'<span class="chip">{escape(part)}</span>' for part in split.split())


def _reasons(plan: Plan, explanation: Explanation | None) -> dict[str, str]:
    """The reason for each op by its key: what it costs, and what the next best would."""
    return {row.key: decision_reason(plan, row) for row in explanation.rows} if explanation is not None else {}


def _made_table(plan: Plan) -> str:
    rows = [("fingerprint", plan.fingerprint), ("torch", plan.torch_version), ("hardware", plan.cluster.source)]
    batch = ", ".join(f"{name} {list(entry.shape)} {entry.dtype}" for name, entry in plan.batch.items())
    rows += [("model", plan.model.spec or plan.model.name), ("batch, all ranks", batch)]
    if plan.model.options:
        rows.append(("options", ", ".join(f"{key}={value}" for key, value in plan.model.options.items())))
    for name, num_bytes in plan.predicted.comm_bytes.items():
        rows.append((f"{name}, each rank", f"{format_bytes(num_bytes)} a step"))
    return table(("", ""), [(escape(name), f"<code>{escape(value)}</code>") for name, value in rows if value])
