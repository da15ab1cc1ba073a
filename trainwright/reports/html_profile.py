"""Profiles as HTML files that stand alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..artifacts import Fit, OpCost, Profile, Remedy
from ..artifacts.record import write_atomically
from .measures import MEASURES, time_s
from .memory_figures import breakdown_figure
from .module_figures import modules_figure
from .page import Page, Tile, folded, grid, notes, number, table
from .peak_figures import peak_figure
from .question_figures import fit_figure, sweep_figure
from .sections import memory_section, notes_section
from .tree import module_rows, short_op
from .units import axis_name, format_bytes, format_count, format_flops, format_ratio, format_s

__all__ = ["write_profile"]

_NUM_OPS = 30


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write what a step costs, and where, as a page.

    Memory over the step, what is alive at the peak, modules by memory, time and work, the hottest ops; and the answers
    to `--fits` and `--sweep`, where they were asked.
    """
    subtitle = f"{profile.dtype} · {profile.optimizer} · one steady-state step on {profile.target}"
    page = Page(profile.model or "a model", subtitle, _tiles(profile))
    budget_bytes = profile.fit.budget_bytes if profile.fit is not None else None
    if profile.fit is not None and not profile.fit.fits:
        _fit_section(page, profile, profile.fit)
    if profile.sweep:
        _sweep_section(page, profile, budget_bytes)
    if profile.timeline:
        memory_section(page, profile.timeline, profile.peak_bytes, budget_bytes)
    _peak_section(page, profile)
    if profile.modules:
        _modules_section(page, profile)
    if profile.ops:
        _ops_section(page, profile.ops[:_NUM_OPS])
    notes_section(page, profile.notes)
    write_atomically(Path(path), page.html())


def _tiles(profile: Profile) -> list[Tile]:
    tiles = [
        _peak_tile(profile),
        Tile("saved for the backward", format_bytes(profile.saved_bytes)),
        Tile("parameters", format_count(profile.num_params), format_bytes(profile.param_bytes)),
        Tile("forward and backward", format_flops(profile.forward_flops + profile.backward_flops)),
        Tile("ops of a step", format_count(profile.num_ops)),
    ]
    if profile.step_s is not None:
        tiles.insert(1, Tile("step", format_s(profile.step_s), "predicted, one device"))
    return tiles


def _peak_tile(profile: Profile) -> Tile:
    peak = format_bytes(profile.peak_bytes)
    if profile.fit is None:
        return Tile("peak of a step", peak, short_op(profile.peak_at))
    budget, share = profile.fit.budget_bytes, profile.peak_bytes / profile.fit.budget_bytes
    verdict = "fits into" if profile.fit.fits else "does not fit into"
    return Tile("peak of a step", peak, f"{verdict} {format_bytes(budget)}", share, bad=not profile.fit.fits)


# Questions


def _fit_section(page: Page, profile: Profile, fit: Fit) -> None:
    parts = []
    if fit.remedies:
        chart = page.chart(fit_figure(profile, fit), "peak with each change, beside the budget")
        parts += [chart, folded("As a table", _remedy_table(profile, fit.remedies), is_open=True)]
    lead = f"{format_bytes(profile.peak_bytes - fit.budget_bytes)} too much. Each change was profiled by itself."
    page.section("What would make it fit", *parts, notes(f"not tried: {text}" for text in fit.not_tried), lead=lead)


def _remedy_table(profile: Profile, remedies: Sequence[Remedy]) -> str:
    rows = []
    for remedy in remedies:
        verdict = '<span class="good">fits</span>' if remedy.fits else '<span class="wrong">does not</span>'
        sizes = (format_bytes(remedy.peak_bytes), format_bytes(remedy.saving_bytes))
        step = "" if remedy.step_s is None else format_ratio(remedy.step_s, profile.step_s)
        options = "".join(f"<br><code>{escape(option)}</code>" for option in remedy.options)
        rows.append((escape(remedy.name) + options, *sizes, step, verdict))
    return table(("change", "peak", "saves", "step", ""), rows, numbers=(1, 2, 3))


def _sweep_section(page: Page, profile: Profile, budget_bytes: int | None) -> None:
    axis = profile.sweep[0].axis
    columns = (axis_name(axis), "peak", "saved", "forward", "backward", "step")
    rows = [
        (
            str(point.value),
            format_bytes(point.peak_bytes),
            format_bytes(point.saved_bytes),
            format_flops(point.forward_flops),
            format_flops(point.backward_flops),
            format_s(point.step_s),
        )
        for point in profile.sweep
    ]
    chart = page.chart(sweep_figure(profile.sweep, budget_bytes), f"peak and time over {columns[0]}")
    largest = profile.fit.largest_that_fits.get(axis) if profile.fit is not None else None
    lead = f"The largest that fits: {largest}." if largest is not None else ""
    card = f'<div class="card">{table(columns, rows, numbers=range(6))}</div>'
    page.section(f"Over {columns[0]}", grid(chart, card), lead=lead)


# Where it goes


def _peak_section(page: Page, profile: Profile) -> None:
    parts = []
    if profile.breakdown:
        parts.append(page.chart(breakdown_figure(profile.breakdown), "memory at the peak, by category"))
    if any(module.at_peak_bytes for module in profile.modules):
        parts.append(page.chart(peak_figure(profile.modules), "memory at the peak, by module and category"))
    if parts:
        at = f" ({short_op(profile.peak_at)})" if profile.peak_at else ""
        lead = f"What is alive when memory is highest{at}: by what it is for, and by module."
        page.section("At the peak", grid(*parts), lead=lead)


def _modules_section(page: Page, profile: Profile) -> None:
    chart = page.chart(modules_figure(profile.modules), "modules by memory, time or work")
    lead = "Area is what the button says; click a module to go into it, the bar above to come back."
    page.section("Where it goes", chart, folded("All modules", _module_table(profile)), lead=lead)


def _module_table(profile: Profile) -> str:
    rows = []
    for row in module_rows(profile.modules):
        cost = row.cost
        kind = escape(cost.type) + (f" ×{row.count}" if row.count > 1 else "")
        name = f"<code>{escape(row.label or '(all)')}</code>"
        at_peak, seconds = MEASURES["memory"].read(cost), time_s(cost)
        cells = [number(cost.num_params, format_count), number(cost.param_bytes, format_bytes)]
        cells += [number(at_peak, format_bytes), number(cost.saved_bytes, format_bytes)]
        cells += [number(cost.forward_flops, format_flops), number(cost.backward_flops, format_flops)]
        cells += [number(seconds, format_s) if seconds else "–", number(cost.num_ops, format_count)]
        rows.append((name, kind, *cells))
    columns = ("module", "type", "parameters", "bytes", "at the peak", "saved", "forward", "backward", "time", "ops")
    return table(columns, rows, numbers=range(2, 10), sortable=True)


def _ops_section(page: Page, ops: Sequence[OpCost]) -> None:
    timed = ops[0].time_s is not None
    rows = []
    for op in ops:
        name, path = f"<code>{escape(short_op(op.op))}</code>", f"<code>{escape(op.path or '(the model)')}</code>"
        cells = [number(op.calls, format_count)]
        cells += [number(op.time_s or 0.0, format_s, of=ops[0].time_s or 0.0)] if timed else []
        cells += [number(op.flops, format_flops, of=0 if timed else ops[0].flops)]
        cells += [number(op.moved_bytes, format_bytes)]
        rows.append((name, path, escape(op.phase), *cells))
    columns = ("op", "module", "phase", "calls", *(("time",) if timed else ()), "FLOPs", "bytes moved")
    by = "time" if timed else "FLOPs; with --hardware, by time"
    lead = f"The first {len(rows)} by {by}; blocks together (*). Click a column's name to sort by it."
    listed = table(columns, rows, numbers=range(3, len(columns)), sortable=True)
    page.section("Hottest ops", f'<div class="card">{listed}</div>', lead=lead)
