"""Charts that set plans beside one another, and predictions beside measurements.

Text that comes from a model or a user is escaped: plotly reads a subset of HTML.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ..artifacts import Plan, Refusal, Report
from .figures import BUDGET, COLORS, INFEASIBLE, MEASURED, Figure, time_unit_of, unit_of
from .units import format_bytes, format_s

_TIMES = {
    "compute_s": ("compute", "#4477aa"),
    "exposed_comm_s": ("communication exposed", "#cc6677"),
    "recompute_s": ("recomputation", "#33997f"),
    "transfer_s": ("transfers", "#ddaa33"),
}


def step_times_figure(plans: Mapping[str, Plan | Refusal]) -> Figure:
    """Return the predicted step time of each recipe, by what it is spent on; the infeasible ones hatched."""
    longest = max((plan.predicted.step_s for plan in plans.values() if isinstance(plan, Plan)), default=1.0)
    scale, unit = time_unit_of(longest)
    names = list(plans)[::-1]
    data = []
    for key, (label, color) in _TIMES.items():
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
    scale, unit = unit_of(longest)
    texts = [format_bytes(peak) for peak in peaks]
    data = [_stacked_bar(names, [peak / scale for peak in peaks], "peak", COLORS["param"], texts)]
    data.append(_infeasible_bar(plans, names, (budget_bytes or longest) / scale))
    if budget_bytes is not None:
        data.append(_across(names, budget_bytes, scale, "budget", BUDGET, dash="dash"))
    too_large = [plan for plan in plans.values() if isinstance(plan, Plan) and not plan.fits_device]
    if too_large:
        data.append(_across(names, too_large[0].cluster.device.memory_bytes, scale, "memory of a device", BUDGET))
    return {"data": data, "layout": _bars_layout(unit, len(names))}


def measured_figure(report: Report) -> Figure:
    """Return each rank's measured peak, with the predicted one and the budget as lines."""
    scale, unit = unit_of(max([*report.peak_bytes, report.predicted_peak_bytes, report.budget_bytes or 0]))
    names = [f"rank {rank}" for rank in range(len(report.peak_bytes))][::-1]
    peaks = list(report.peak_bytes)[::-1]
    texts = [format_bytes(peak) for peak in peaks]
    bars = _stacked_bar(names, [peak / scale for peak in peaks], "measured", MEASURED, texts)
    data = [bars, _across(names, report.predicted_peak_bytes, scale, "predicted", COLORS["param"])]
    if report.budget_bytes is not None:
        data.append(_across(names, report.budget_bytes, scale, "budget", BUDGET, dash="dash"))
    return {"data": data, "layout": _bars_layout(unit, len(names))}


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
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "margin": {"t": 60, "r": 20, "l": 20, "b": 50},
        "height": 150 + max(22, 38 - num_bars) * num_bars,
    }


def _across(names: list[str], num_bytes: int, scale: float, label: str, color: str, dash: str = "solid") -> Figure:
    """A vertical line over all bars, with its name in the legend."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{label} {format_bytes(num_bytes)}",
        "x": [num_bytes / scale] * len(names),
        "y": [escape(name) for name in names],
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"symbol": "line-ns-open", "size": 30, "color": color},
        "hovertemplate": f"{escape(label)} {format_bytes(num_bytes)}<extra></extra>",
    }
