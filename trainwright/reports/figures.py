"""Charts as plain plotly figures (`data` and `layout`); colours and fonts of the theme are set in the page.

Text that comes from a model or a user is escaped: plotly reads a subset of HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from ..artifacts import MemoryPoint, ModuleCost, Plan, Refusal, Report
from .tree import ModuleRow, module_rows, short_op
from .units import category_name, format_bytes, format_count, format_flops, format_s

Figure = dict[str, Any]

COLORS = {
    "param": "#4477aa",
    "optimizer": "#8866aa",
    "grad": "#dd9944",
    "saved": "#33997f",
    "other": "#99a3ad",
}
"""By category of memory, in the order in which they are stacked."""
TIMES = {
    "compute_s": ("compute", "#4477aa"),
    "exposed_comm_s": ("communication exposed", "#cc6677"),
    "recompute_s": ("recomputation", "#33997f"),
    "transfer_s": ("transfers", "#ddaa33"),
}
PEAK, BUDGET, MEASURED, INFEASIBLE = "#bb3344", "#bb3344", "#33997f", "#99a3ad"
MAX_POINTS = 3000
_BUDGET_SHOWN_UP_TO = 1.6
"""Of the peak: a budget beyond would flatten the rest."""
_KIB = 1024


def memory_figure(timeline: Sequence[MemoryPoint], peak_bytes: int, budget_bytes: int | None) -> Figure:
    """Return what is alive over the step as stacked areas by category, with the peak and the budget."""
    points = thinned(timeline)
    scale, unit = _unit_of(peak_bytes)
    data = [_area(key, points, scale) for key in COLORS]
    data += [_peak_trace(points, peak_bytes, scale)]
    if budget_bytes is not None and budget_bytes <= _BUDGET_SHOWN_UP_TO * peak_bytes:
        data.append(_budget_trace(points, budget_bytes, scale))
    layout = {
        "xaxis": {
            "title": {"text": "events of the step, in order"},
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


def thinned(timeline: Sequence[MemoryPoint], limit: int = MAX_POINTS) -> list[tuple[int, MemoryPoint]]:
    """Return at most about `limit` points with their places: of each stretch the one with the most memory."""
    numbered = list(enumerate(timeline))
    if len(numbered) <= limit:
        return numbered
    stretch = -(-len(numbered) // limit)
    chunks = (numbered[start : start + stretch] for start in range(0, len(numbered), stretch))
    return [max(chunk, key=lambda item: item[1].live_bytes) for chunk in chunks]


def breakdown_figure(breakdown: Mapping[str, int]) -> Figure:
    """Return what is alive at the peak, one bar a category."""
    shown = sorted(((key, size) for key, size in breakdown.items() if size), key=lambda item: item[1])
    scale, unit = _unit_of(max((size for _, size in shown), default=1))
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [escape(category_name(key)) for key, _ in shown],
        "x": [size / scale for _, size in shown],
        "marker": {"color": [COLORS.get(key, COLORS["other"]) for key, _ in shown]},
        "text": [format_bytes(size) for _, size in shown],
        "textposition": "auto",
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": unit}, "rangemode": "tozero"}, "yaxis": {"automargin": True}}
    return {"data": [bar], "layout": {**layout, "margin": {"t": 10, "r": 20, "l": 20, "b": 50}, "height": 300}}


def treemap_figure(modules: Iterable[ModuleCost]) -> Figure:
    """Return the modules as a treemap; `menu` holds what its area can show, for the page's buttons."""
    nodes = _treemap_nodes(module_rows(modules))
    menu = {name: _treemap_values(nodes, read, shown) for name, (read, shown) in _AREAS.items()}
    menu = {name: values for name, values in menu.items() if any(values["values"][0])}
    trace = {
        "type": "treemap",
        "ids": [node.id for node in nodes],
        "labels": [escape(node.name) for node in nodes],
        "parents": [node.parent for node in nodes],
        "branchvalues": "remainder",
        "texttemplate": "%{label}<br>%{customdata[0]}",
        "hovertemplate": "<b>%{customdata[1]}</b><br>%{customdata[2]}<br>%{customdata[0]}<extra></extra>",
        "maxdepth": 4,
        "tiling": {"pad": 2},
        "marker": {"cornerradius": 3},
    }
    if menu:
        trace |= {key: value[0] for key, value in next(iter(menu.values())).items()}
    layout = {"margin": {"t": 10, "r": 10, "l": 10, "b": 10}, "height": 440, "treemapcolorway": _PALETTE}
    return {"data": [trace], "layout": layout, "menu": menu}


def step_times_figure(plans: Mapping[str, Plan | Refusal]) -> Figure:
    """Return the predicted step time of each recipe, by what it is spent on; the infeasible ones hatched."""
    longest = max((plan.predicted.step_s for plan in plans.values() if isinstance(plan, Plan)), default=1.0)
    scale, unit = (1, "s") if longest >= 1 else (1e-3, "ms")
    names = list(plans)[::-1]
    data = []
    for key, (label, color) in TIMES.items():
        seconds = [_predicted(plans[name], key) for name in names]
        if any(seconds):
            data.append(_stacked_bar(names, [s / scale for s in seconds], label, color, [format_s(s) for s in seconds]))
    data.append(_infeasible_bar(plans, names, longest / scale))
    return {"data": data, "layout": _bars_layout(unit, len(names))}


def peaks_figure(plans: Mapping[str, Plan | Refusal], budget_bytes: int | None) -> Figure:
    """Return the predicted peak of each recipe beside the budget; the infeasible ones hatched."""
    names = list(plans)[::-1]
    peaks = [int(_predicted(plans[name], "peak_bytes")) for name in names]
    longest = max([*peaks, budget_bytes or 0])
    scale, unit = _unit_of(longest)
    texts = [format_bytes(peak) for peak in peaks]
    data = [_stacked_bar(names, [peak / scale for peak in peaks], "peak", COLORS["param"], texts)]
    data.append(_infeasible_bar(plans, names, (budget_bytes or longest) / scale))
    if budget_bytes is not None:
        data.append(_across(names, budget_bytes / scale, "budget", budget_bytes, BUDGET, dash="dash"))
    return {"data": data, "layout": _bars_layout(unit, len(names))}


def measured_figure(report: Report) -> Figure:
    """Return each rank's measured peak, with the predicted one and the budget as lines."""
    scale, unit = _unit_of(max([*report.peak_bytes, report.predicted_peak_bytes, report.budget_bytes or 0]))
    names = [f"rank {rank}" for rank in range(len(report.peak_bytes))][::-1]
    peaks = list(report.peak_bytes)[::-1]
    texts = [format_bytes(peak) for peak in peaks]
    bars = _stacked_bar(names, [peak / scale for peak in peaks], "measured", MEASURED, texts)
    predicted = _across(
        names, report.predicted_peak_bytes / scale, "predicted", report.predicted_peak_bytes, COLORS["param"]
    )
    data = [bars, predicted]
    if report.budget_bytes is not None:
        data.append(_across(names, report.budget_bytes / scale, "budget", report.budget_bytes, BUDGET, dash="dash"))
    return {"data": data, "layout": _bars_layout(unit, len(names))}


# Memory over the step


def _area(key: str, points: Sequence[tuple[int, MemoryPoint]], scale: float) -> Figure:
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


def _peak_trace(points: Sequence[tuple[int, MemoryPoint]], peak_bytes: int, scale: float) -> Figure:
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
        "text": [f"peak {format_bytes(peak_bytes)}" if place == at else "" for place in range(len(points))],
        "textposition": "top center" if 0.1 < at / max(1, len(points)) < 0.9 else "top left",
        "marker": {"color": PEAK, "size": [9 if place == at else 0 for place in range(len(points))], "opacity": 1},
        "cliponaxis": False,
    }


def _budget_trace(points: Sequence[tuple[int, MemoryPoint]], budget_bytes: int, scale: float) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"budget {format_bytes(budget_bytes)}",
        "x": [points[0][0], points[-1][0]] if points else [],
        "y": [budget_bytes / scale] * (2 if points else 0),
        "line": {"color": BUDGET, "dash": "dash", "width": 1.5},
        "hoverinfo": "skip",
    }


def _phases(points: Sequence[tuple[int, MemoryPoint]]) -> list[tuple[str, int, int]]:
    """Runs of one phase: its name, first and last place."""
    runs = []
    for phase, group in groupby(points, key=lambda item: item[1].phase):
        places = [place for place, _ in group]
        runs.append((phase, places[0], places[-1]))
    return runs


def _phase_lines(points: Sequence[tuple[int, MemoryPoint]]) -> list[Figure]:
    line = {"width": 1, "dash": "dot", "color": "#99a3ad"}
    return [
        {"type": "line", "x0": start, "x1": start, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        for _, start, _ in _phases(points)[1:]
    ]


def _phase_names(points: Sequence[tuple[int, MemoryPoint]]) -> list[Figure]:
    total = max(1, points[-1][0] - points[0][0]) if points else 1
    style = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
    return [
        {"x": (start + end) / 2, "text": escape(phase), **style}
        for phase, start, end in _phases(points)
        if end - start > 0.04 * total
    ]


# Where it goes

_AREAS = {
    "saved bytes": (lambda cost: cost.saved_bytes, format_bytes),
    "parameter bytes": (lambda cost: cost.param_bytes, format_bytes),
    "FLOPs": (lambda cost: cost.forward_flops + cost.backward_flops, format_flops),
    "ops": (lambda cost: cost.num_ops, lambda count: f"{format_count(count)} ops"),
}


_PALETTE = ["#4477aa", "#33997f", "#8866aa", "#bb7733", "#cc6677", "#668844", "#557788", "#997755"]
_ROOT = "(all)"


@dataclass(frozen=True)
class _Node:
    """A rectangle of the treemap: a module, or what a module costs beyond those in it (`itself`)."""

    id: str
    parent: str
    name: str
    row: ModuleRow
    below: tuple[ModuleRow, ...]
    itself: bool = False


def _treemap_nodes(rows: Sequence[ModuleRow]) -> list[_Node]:
    labels = {row.label for row in rows}
    parents = {row.label: _nearest_parent(row.label, labels) for row in rows}
    nodes = []
    for row in rows:
        below = tuple(other for other in rows if parents[other.label] == row.label)
        own_id, above = row.label or _ROOT, parents[row.label]
        times = f" ×{row.count}" if row.count > 1 else ""
        nodes.append(_Node(own_id, "" if above is None else above or _ROOT, (row.name or _ROOT) + times, row, below))
        if below:
            nodes.append(_Node(f"{own_id} itself", own_id, "itself", row, below, itself=True))
    return nodes


def _treemap_values(nodes: Sequence[_Node], read: Any, shown: Any) -> dict[str, Any]:
    """What `Plotly.restyle` takes: the area of each rectangle that has none inside, and the texts of all."""
    wholes = [read(node.row.cost) for node in nodes]
    rests = [max(0, whole - sum(read(row.cost) for row in node.below)) for node, whole in zip(nodes, wholes)]
    areas = [rest if node.itself or not node.below else 0 for node, rest in zip(nodes, rests)]
    texts = [
        [shown(rest if node.itself else whole), escape(node.row.label or _ROOT), escape(node.row.cost.type)]
        for node, whole, rest in zip(nodes, wholes, rests)
    ]
    return {"values": [areas], "customdata": [texts]}


def _nearest_parent(label: str, labels: set[str]) -> str | None:
    """The module that holds this one, of those that have a row; `None` for the root."""
    if not label:
        return None
    parent = label.rpartition(".")[0]
    return parent if not parent or parent in labels else _nearest_parent(parent, labels)


# Recipes side by side


def _predicted(found: Plan | Refusal, key: str) -> float:
    return float(getattr(found.predicted, key)) if isinstance(found, Plan) else 0.0


def _stacked_bar(names: list[str], values: list[float], label: str, color: str, texts: list[str]) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "y": [escape(name) for name in names],
        "x": values,
        "customdata": texts,
        "hovertemplate": f"%{{y}}: {escape(label)} %{{customdata}}<extra></extra>",
        "marker": {"color": color},
    }


def _infeasible_bar(plans: Mapping[str, Plan | Refusal], names: list[str], length: float) -> Figure:
    """A hatched bar for each recipe that does not fit, with the reason on hovering."""
    refused = [name for name in names if not isinstance(plans[name], Plan)]
    reasons = [_reason(plans[name]) for name in refused]
    bar = _stacked_bar(refused, [length] * len(refused), "does not fit", INFEASIBLE, reasons)
    bar["marker"] = {
        "color": "rgba(0,0,0,0)",
        "line": {"color": INFEASIBLE, "width": 1},
        "pattern": {"shape": "/", "fgcolor": INFEASIBLE, "size": 7},
    }
    return bar | {"hovertemplate": "%{y}: %{customdata}<extra></extra>", "showlegend": bool(refused)}


def _reason(found: Plan | Refusal, width: int = 60) -> str:
    """The refusal in lines that a hover box can hold."""
    lines, line = [], ""
    for word in str(found).split():
        if line and len(line) + len(word) >= width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "<br>".join(escape(each) for each in [*lines, line])


def _bars_layout(unit: str, num_bars: int) -> Figure:
    return {
        "barmode": "stack",
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 60, "r": 20, "l": 20, "b": 50},
        "height": 150 + max(22, 38 - num_bars) * num_bars,
    }


def _across(names: list[str], x: float, label: str, num_bytes: int, color: str, dash: str = "solid") -> Figure:
    """A vertical line over all bars, with its name in the legend."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{label} {format_bytes(num_bytes)}",
        "x": [x] * len(names),
        "y": [escape(name) for name in names],
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"symbol": "line-ns-open", "size": 30, "color": color},
        "hovertemplate": f"{escape(label)} {format_bytes(num_bytes)}<extra></extra>",
    }


def _unit_of(largest: float) -> tuple[float, str]:
    """The unit in which `largest` bytes read best."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= _KIB**power:
            return float(_KIB**power), unit
    return 1.0, "B"
