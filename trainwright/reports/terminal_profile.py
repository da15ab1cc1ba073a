"""A profile as text for the terminal: totals, whether it fits, sweeps, the tree of modules, the hottest ops."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from ..artifacts import Fit, OpCost, Profile, Remedy, SweepPoint
from .fold import MIN_SHARE, folded_rows
from .measures import MEASURES, time_s
from .text import Grid, note_lines, plain_table, rendered, title_line
from .tree import ModuleRow, module_rows, short_op
from .units import axis_name, category_name, format_bytes, format_count, format_flops, format_ratio, format_s

__all__ = ["profile_table"]

_NUM_OPS = 5


def profile_table(profile: Profile, depth: int = 2, sort: str | None = None) -> str:
    """Return what a step costs, and a tree of modules of `depth` levels, sorted by memory, time, flops or params."""
    title = title_line(profile.model, profile.dtype, profile.optimizer, f"one step on {profile.target}")
    parts: list[RenderableType] = [title, _memory_of(profile), _work_of(profile)]
    if profile.fit is not None:
        parts += _fit_parts(profile, profile.fit)
    if profile.sweep:
        parts += _sweep_parts(profile)
    if profile.modules:
        parts += _module_parts(profile, depth, sort)
    if profile.ops:
        parts.append(_op_table(profile.ops[:_NUM_OPS]))
    return rendered(*parts, *note_lines(profile.notes))


# Totals


def _memory_of(profile: Profile) -> Grid:
    table = plain_table("memory", "", "", header=False)
    table.add_row("parameters", format_bytes(profile.param_bytes), f"{format_count(profile.num_params)} parameters")
    if profile.buffer_bytes:
        table.add_row("buffers", format_bytes(profile.buffer_bytes), "")
    table.add_row("gradients", format_bytes(profile.grad_bytes), "")
    table.add_row("optimizer", format_bytes(profile.optimizer_bytes), profile.optimizer)
    table.add_row("saved", format_bytes(profile.saved_bytes), "alive when the forward has ended")
    at = f"in {short_op(profile.peak_at)}" if profile.peak_at else ""
    table.add_row(Text("peak", style="bold"), Text(format_bytes(profile.peak_bytes), style="bold"), Text(at))
    if profile.breakdown:
        largest = sorted(profile.breakdown.items(), key=lambda item: -item[1])
        alive = ", ".join(f"{category_name(name)} {format_bytes(size)}" for name, size in largest)
        table.add_row("", "", alive)
    if profile.reserved_bytes is not None:
        table.add_row("reserved", format_bytes(profile.reserved_bytes), "at most, by the device's caching allocator")
    if profile.compiled is not None and profile.compiled.pool_bytes is not None:
        table.add_row("  graphs", format_bytes(profile.compiled.pool_bytes), "of it in the CUDA graphs' own pool")
    return table


def _work_of(profile: Profile) -> Grid:
    table = plain_table("work", "", "", header=False)
    table.add_row("forward", format_flops(profile.forward_flops), "")
    table.add_row("backward", format_flops(profile.backward_flops), "")
    table.add_row("other", format_flops(profile.other_flops), f"{profile.num_ops} ops in all")
    if (made := profile.compiled) is not None:
        table.add_row("compiled", f"{made.num_kernels}", f"kernels of {made.num_ops} ops, in {made.num_graphs} graphs")
    if profile.step_s is not None:
        table.add_row("step", format_s(profile.step_s), "predicted, one device")
    return table


# Questions


def _fit_parts(profile: Profile, fit: Fit) -> list[RenderableType]:
    room = fit.budget_bytes - profile.peak_bytes
    if fit.fits:
        verdict = Text(f"fits into {format_bytes(fit.budget_bytes)}: {format_bytes(room)} to spare", "bold green")
        reserved = profile.reserved_bytes or 0
        tight = f"the caching allocator may reserve {format_bytes(reserved)}, which does not fit"
        return [Text(), verdict, *note_lines([tight] if reserved > fit.budget_bytes else [])]
    short = f"does NOT fit into {format_bytes(fit.budget_bytes)}: {format_bytes(-room)} too much"
    parts: list[RenderableType] = [Text(), Text(short, style="bold red")]
    if fit.remedies:
        parts.append(_remedy_table(profile, fit.remedies))
    if not any(remedy.fits for remedy in fit.remedies):
        parts.append(Text("nothing that was tried fits one device; `trainwright plan` spreads a model over several"))
    return parts + [Text(f"not tried: {reason}", style="dim") for reason in fit.not_tried]


def _remedy_table(profile: Profile, remedies: Sequence[Remedy]) -> Grid:
    timed = any(remedy.step_s is not None for remedy in remedies)
    table = plain_table("what would help", "peak", "saves", *(("step", "slower") if timed else ()), "fits", "",
                        drop=("saves", "slower"))  # fmt: skip
    for remedy in remedies:
        times = (format_s(remedy.step_s), format_ratio(remedy.step_s, profile.step_s)) if timed else ()
        sizes = (format_bytes(remedy.peak_bytes), format_bytes(remedy.saving_bytes))
        verdict = Text("yes" if remedy.fits else "no", style="bold green" if remedy.fits else "red")
        table.add_row(remedy.name, *sizes, *times, verdict, Text(" ".join(remedy.options), style="dim"))
    return table


def _sweep_parts(profile: Profile) -> list[RenderableType]:
    points, fit = profile.sweep, profile.fit
    axis = points[0].axis
    columns = [axis_name(axis), "peak", "saved", "forward", "backward"]
    columns += ["step"] if points[0].step_s is not None else []
    fits = ["fits"] if fit is not None else []
    table = plain_table(*columns, *fits, left=0, drop=("backward", "forward", "saved"))
    for point in points:
        table.add_row(*_sweep_cells(point, fit))
    parts: list[RenderableType] = [table]
    if fit is not None:
        largest = fit.largest_that_fits.get(axis)
        said = "no size that was tried fits" if largest is None else f"largest {columns[0]} that fits: {largest}"
        parts.append(Text(f"{said}{'' if any(p.peak_bytes > fit.budget_bytes for p in points) else ' (all tried do)'}"))
    return parts


def _sweep_cells(point: SweepPoint, fit: Fit | None) -> list[str | Text]:
    cells: list[str | Text] = [str(point.value), format_bytes(point.peak_bytes), format_bytes(point.saved_bytes)]
    cells += [format_flops(point.forward_flops), format_flops(point.backward_flops)]
    if point.step_s is not None:
        cells.append(format_s(point.step_s))
    if fit is not None:
        fits = point.peak_bytes <= fit.budget_bytes
        cells.append(Text("yes" if fits else "no", style="bold green" if fits else "red"))
    return cells


# Where it goes

_LEAST_TELLING = ("ops", "type", "backward", "forward", "parameters", "time", "saved")
"""Columns of the table of modules that a narrow terminal has no room for, the first to go first."""


def _module_parts(profile: Profile, depth: int, sort: str | None) -> list[RenderableType]:
    rows = folded_rows(module_rows(profile.modules, depth), sort)
    rows = folded_rows(module_rows(profile.modules, depth), sort)
    numbers = [("parameters", lambda cost: format_count(cost.num_params))]
    numbers += [(MEASURES["memory"].label, lambda cost: format_bytes(MEASURES["memory"].read(cost)))]
    numbers += [("saved", lambda cost: format_bytes(cost.saved_bytes))]
    numbers += [("forward", lambda cost: format_flops(cost.forward_flops))]
    numbers += [("backward", lambda cost: format_flops(cost.backward_flops))]
    if any(time_s(row.cost) for row in rows):
        numbers += [("time", lambda cost: format_s(time_s(cost)))]
    numbers += [("ops", lambda cost: str(cost.num_ops))]
    drop = [name for name in _LEAST_TELLING if MEASURES.get(sort or "memory", MEASURES["memory"]).label != name]
    table = plain_table("module", "type", *(name for name, _ in numbers), left=2, drop=drop)
    for row in rows:
        table.add_row(_row_name(row), Text(row.cost.type, style="dim"), *(shown(row.cost) for _, shown in numbers))
    return [table, *note_lines(_left_out(profile, rows, depth))]


def _row_name(row: ModuleRow) -> Text:
    times = f" ×{row.count}" if row.count > 1 else ""
    return Text("  " * row.level + (row.name or "(all)") + times, style="dim" if row.num_folded else "")


def _left_out(profile: Profile, rows: Sequence[ModuleRow], depth: int) -> list[str]:
    """What the tree does not show, in words."""
    texts = []
    if any(row.count > 1 for row in rows):
        texts.append("×N: N blocks of equal cost in one row, their costs added")
    if num_folded := sum(row.num_folded for row in rows):
        texts.append(f"{num_folded} rows of less than {100 * MIN_SHARE:.0f} % of the whole are folded")
    if num_deeper := len(module_rows(profile.modules)) - len(module_rows(profile.modules, depth)):
        texts.append(f"{num_deeper} rows lie deeper; --depth {depth + 1} shows the next level")
    return ["; ".join(texts)] if texts else []


def _op_table(ops: Sequence[OpCost]) -> Grid:
    timed = ops[0].time_s is not None
    table = plain_table(
        "hottest ops", "module", "phase", "calls", *(("time",) if timed else ()), "FLOPs", "moved",
        left=3, drop=("calls", "moved", "phase", "FLOPs"),
    )  # fmt: skip
    for op in ops:
        times = (format_s(op.time_s),) if timed else ()
        name, path = Text(short_op(op.op)), Text(op.path or "(the model)")
        table.add_row(name, path, op.phase, str(op.calls), *times, format_flops(op.flops), format_bytes(op.moved_bytes))
    return table
