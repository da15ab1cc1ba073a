"""Time against memory: a frontier of plans as a chart and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from ..artifacts import Plan
from .decisions import micro_batches_text
from .figures import BUDGET, COLORS, MEASURED, Figure, time_unit_of, unit_of
from .text import plain_table, rendered
from .units import format_bytes, format_ratio, format_s


def frontier_figure(points: Sequence[Plan], chosen: Plan | None = None, files: Sequence[str] = ()) -> Figure:
    """Return the step's time over the memory that it takes, a stair whose corners are plans; `chosen` stands out.

    files: where the plans were written, in order; each corner names its own.
    """
    scale, unit = unit_of(max(plan.predicted.peak_bytes for plan in points))
    slowest = max(plan.predicted.step_s for plan in points)
    second, time_unit = time_unit_of(slowest)
    stair = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "text": [escape(Path(file).stem) for file in files],
        "textposition": "top right",
        "name": "fastest plan",
        "x": [plan.predicted.peak_bytes / scale for plan in points],
        "y": [plan.predicted.step_s / second for plan in points],
        "cliponaxis": False,
        "customdata": [_hover(plan, file) for plan, file in zip_longest(points, files[: len(points)])],
        "hovertemplate": "%{customdata}<extra></extra>",
        "line": {"shape": "hv", "color": COLORS["param"], "width": 2},
        "marker": {"size": 9},
    }
    data = [stair]
    if chosen is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "this plan",
                "x": [chosen.predicted.peak_bytes / scale],
                "y": [chosen.predicted.step_s / second],
                "customdata": [_hover(chosen)],
                "hovertemplate": "%{customdata}<extra></extra>",
                "marker": {"size": 15, "symbol": "circle-open", "color": MEASURED, "line": {"width": 3}},
            }
        )
    layout = {
        "xaxis": {"title": {"text": f"peak per device, {unit}"}},
        "yaxis": {"title": {"text": f"step, {time_unit}"}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 50, "r": 30, "l": 70, "b": 50},
        "height": 400,
    }
    if chosen is not None and chosen.budget_bytes is not None:
        place = chosen.budget_bytes / scale
        across = {"yref": "paper", "y0": 0, "y1": 1, "x0": place, "x1": place}
        layout["shapes"] = [{"type": "line", **across, "line": {"color": BUDGET, "dash": "dash", "width": 1.5}}]
    return {"data": data, "layout": layout}


def frontier_table(points: Sequence[Plan], files: Sequence[str] = ()) -> str:
    """Return the plans of a frontier for the terminal, the smallest first; `files` are where they were written."""
    table = plain_table(*(["plan"] if files else []), "peak", "step", "compute", "comm exposed", "recompute", "mesh", "",
                        drop=("compute", "recompute", "comm exposed"))  # fmt: skip
    fastest = min(plan.predicted.step_s for plan in points)
    for plan, file in zip_longest(points, files[: len(points)]):
        found = plan.predicted
        times = (found.step_s, found.compute_s, found.exposed_comm_s, found.recompute_s)
        slower = "fastest" if found.step_s == fastest else format_ratio(found.step_s, fastest)
        named = [Path(file).name] if file else []
        table.add_row(*named, format_bytes(found.peak_bytes), *map(format_s, times), _mesh(plan), slower)
    return rendered(table)


def _hover(plan: Plan, file: str | None = None) -> str:
    found = plan.predicted
    parts = [
        *([file] if file else []),
        f"{format_s(found.step_s)} with {format_bytes(found.peak_bytes)}",
        f"compute {format_s(found.compute_s)}",
        f"communication exposed {format_s(found.exposed_comm_s)}",
        f"recomputation {format_s(found.recompute_s)}",
        f"mesh {_mesh(plan)}",
    ]
    return "<br>".join(map(escape, parts))


def _mesh(plan: Plan) -> str:
    return ", ".join(("×".join(map(str, plan.mesh.values())), *micro_batches_text(plan)))
