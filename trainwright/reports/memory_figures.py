"""Charts of memory: over the step, and at its peak.

Text that comes from a model or a user is escaped: plotly reads a subset of HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, groupby

from ..artifacts import MemoryPoint
from .figures import BUDGET, COLORS, TEXT_ROOM, Figure, time_unit_of, unit_of
from .tree import short_op
from .units import category_name, format_bytes

MAX_POINTS = 3000
ORDER = "ops of the step, in order"
"""The axis of a step whose times are not known."""
Placed = tuple[float, MemoryPoint]
"""A point with its place on the axis."""
_BUDGET_SHOWN_UP_TO = 1.6
"""Of the peak: a budget beyond would flatten the rest."""


def memory_figure(timeline: Sequence[MemoryPoint], peak_bytes: int, budget_bytes: int | None) -> Figure:
    """Return what is alive over the step as stacked areas by category, with the peak and the budget."""
    placed, axis = _placed(timeline)
    points = thinned(placed)
    scale, unit = unit_of(peak_bytes)
    data = [_area(key, points, scale) for key in COLORS]
    data += [_peak_trace(points, peak_bytes, scale)]
    if budget_bytes is not None and budget_bytes <= _BUDGET_SHOWN_UP_TO * peak_bytes:
        data.append(_budget_trace(points, budget_bytes, scale))
    layout = {
        "xaxis": {
            "title": {"text": axis},
            "hoverformat": ".4~g",
            "showgrid": False,
            "showspikes": True,
            "range": [points[0][0], points[-1][0]] if points else None,
        },
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.09, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "shapes": _phase_lines(points),
        "annotations": _phase_names(points),
        "margin": {"t": 70, "r": 20, "l": 70, "b": 50},
        "height": 440,
    }
    return {"data": data, "layout": layout}


def thinned(placed: Sequence[Placed], limit: int = MAX_POINTS) -> list[Placed]:
    """Return at most about `limit` of the points: of each stretch the one with the most memory."""
    stretch = max(1, -(-len(placed) // limit))
    chunks = (placed[start : start + stretch] for start in range(0, len(placed), stretch))
    return [max(chunk, key=lambda item: item[1].live_bytes) for chunk in chunks]


def _placed(timeline: Sequence[MemoryPoint]) -> tuple[list[Placed], str]:
    """The points with their places on the axis, and what that shows: time where it is known, else the order of the ops.

    Of ops that begin at the same moment (views take no time) the one with the most memory stands for all.
    """
    total_s = sum(point.time_s for point in timeline)
    if not total_s:
        return list(enumerate(timeline)), ORDER
    scale, unit = time_unit_of(total_s)
    begins = accumulate((point.time_s / scale for point in timeline), initial=0.0)
    moments = groupby(zip(begins, timeline), key=lambda item: item[0])
    points = [max(group, key=lambda item: item[1].live_bytes) for _, group in moments]
    return points, f"predicted time, {unit}"


def breakdown_figure(breakdown: Mapping[str, int]) -> Figure:
    """Return what is alive at the peak, one bar a category."""
    shown = sorted(((key, size) for key, size in breakdown.items() if size), key=lambda item: item[1])
    scale, unit = unit_of(max((size for _, size in shown), default=1))
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [escape(category_name(key)) for key, _ in shown],
        "x": [size / scale for _, size in shown],
        "marker": {"color": [COLORS.get(key, COLORS["other"]) for key, _ in shown]},
        "text": [format_bytes(size) for _, size in shown],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    longest = max((size for _, size in shown), default=1) / scale
    layout = {"xaxis": {"title": {"text": unit}, "range": [0, TEXT_ROOM * longest]}, "yaxis": {"automargin": True}}
    return {"data": [bar], "layout": {**layout, "margin": {"t": 10, "r": 20, "l": 20, "b": 50}, "height": 400}}


def _area(key: str, points: Sequence[Placed], scale: float) -> Figure:
    label, color = category_name(key), COLORS[key]
    sizes = [_alive(point, key) for _, point in points]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": [place for place, _ in points],
        "y": [size / scale for size in sizes],
        "customdata": [format_bytes(size) for size in sizes],
        "hovertemplate": "%{customdata}",
        "stackgroup": "alive",
        "line": {"width": 0.5, "color": color, "shape": "hv"},
        "fillcolor": color,
    }


def _alive(point: MemoryPoint, key: str) -> int:
    """The bytes of a category; `other` is all that no category claims."""
    if key != "other":
        return int(getattr(point, f"{key}_bytes"))
    return max(0, point.live_bytes - sum(_alive(point, each) for each in COLORS if each != "other"))


def _peak_trace(points: Sequence[Placed], peak_bytes: int, scale: float) -> Figure:
    """A marker at the peak; the same trace carries each event's op and module, for hovering."""
    top = max((point.live_bytes for _, point in points), default=0)
    at = next((place for place, (_, point) in enumerate(points) if point.live_bytes == top), 0)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "event",
        "showlegend": False,
        "x": [place for place, _ in points],
        "y": [(peak_bytes if place == at else point.live_bytes) / scale for place, (_, point) in enumerate(points)],
        "customdata": [
            [escape(short_op(point.op)), escape(point.path or "(the model)"), format_bytes(point.live_bytes)]
            for _, point in points
        ],
        "hovertemplate": "<b>%{customdata[2]}</b> after %{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        "text": [f"  peak {format_bytes(peak_bytes)}  " if place == at else "" for place in range(len(points))],
        "textposition": "bottom right" if at < 0.8 * len(points) else "bottom left",
        "marker": {"color": BUDGET, "size": [9 if place == at else 0 for place in range(len(points))], "opacity": 1},
        "cliponaxis": False,
    }


def _budget_trace(points: Sequence[Placed], budget_bytes: int, scale: float) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"budget {format_bytes(budget_bytes)}",
        "x": [points[0][0], points[-1][0]] if points else [],
        "y": [budget_bytes / scale] * (2 if points else 0),
        "line": {"color": BUDGET, "dash": "dash", "width": 1.5},
        "hoverinfo": "skip",
    }


def _phases(points: Sequence[Placed]) -> list[tuple[str, float, float]]:
    """Runs of one phase: its name, first and last place."""
    runs = []
    for phase, group in groupby(points, key=lambda item: item[1].phase):
        places = [place for place, _ in group]
        runs.append((phase, places[0], places[-1]))
    return runs


def _phase_lines(points: Sequence[Placed]) -> list[Figure]:
    line = {"width": 1, "dash": "dot", "color": "#99a3ad"}
    return [
        {"type": "line", "x0": start, "x1": start, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        for _, start, _ in _phases(points)[1:]
    ]


def _phase_names(points: Sequence[Placed]) -> list[Figure]:
    total = points[-1][0] - points[0][0] if points else 1
    style = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
    return [
        {"x": (start + end) / 2, "text": escape(phase), **style}
        for phase, start, end in _phases(points)
        if end - start > 0.04 * total
    ]
