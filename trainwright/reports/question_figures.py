"""Charts that answer questions asked of a profile: does it fit, and how does it grow."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..artifacts import Fit, Profile, SweepPoint
from .figures import BUDGET, COLORS, INFEASIBLE, MEASURED, TEXT_ROOM, Figure, time_unit_of, unit_of
from .units import axis_name, format_bytes, format_s
from .wrapping import wrapped

_TIME = "#bb7733"
_LABEL_WIDTH = 24
"""Letters in a line of a bar's name."""
_MIN_GAP = 0.08
"""Between two names on an axis, as a share of it."""


def fit_figure(profile: Profile, fit: Fit) -> Figure:
    """Return the peak as it is and with each change, beside the budget; green fits."""
    entries = [("as it is", profile.peak_bytes, fit.fits)]
    entries += [(remedy.name, remedy.peak_bytes, remedy.fits) for remedy in fit.remedies]
    entries.reverse()
    labels = [wrapped(name, _LABEL_WIDTH) for name, _, _ in entries]
    scale, unit = unit_of(max(profile.peak_bytes, fit.budget_bytes))
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [escape(label).replace("\n", "<br>") for label in labels],
        "x": [peak / scale for _, peak, _ in entries],
        "text": [format_bytes(peak) for _, peak, _ in entries],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [MEASURED if fits else INFEASIBLE for _, _, fits in entries]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    longest = max(fit.budget_bytes, *(peak for _, peak, _ in entries)) / scale
    layout = {
        "xaxis": {"title": {"text": unit}, "range": [0, TEXT_ROOM * longest]},
        "yaxis": {"automargin": True},
        "shapes": [_budget_line("x", fit.budget_bytes / scale)],
        "annotations": [
            {
                "x": fit.budget_bytes / scale,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "text": f"budget {format_bytes(fit.budget_bytes)}",
                "showarrow": False,
                "font": {"color": BUDGET},
            }
        ],
        "margin": {"t": 40, "r": 20, "l": 20, "b": 50},
        "height": 120 + sum(24 + 16 * label.count("\n") for label in labels),
    }
    return {"data": [bar], "layout": layout}


def sweep_figure(points: Sequence[SweepPoint], budget_bytes: int | None) -> Figure:
    """Return the peak, what is saved and, where known, the step's time over the sizes of a sweep."""
    scale, unit = unit_of(max(point.peak_bytes for point in points))
    sizes = [("peak", [point.peak_bytes for point in points], COLORS["param"])]
    sizes += [("saved for the backward", [point.saved_bytes for point in points], COLORS["saved"])]
    values = [point.value for point in points]
    data = [_line(name, values, [s / scale for s in found], list(map(format_bytes, found)), color)
            for name, found, color in sizes]  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {
            "title": {"text": axis_name(points[0].axis)},
            "type": "log",
            "tickvals": _apart(values),
            "ticktext": list(map(str, _apart(values))),
            "tickangle": 0,
        },
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "margin": {"t": 60, "r": 60, "l": 70, "b": 50},
        "height": 400,
    }
    if budget_bytes is not None:
        layout["shapes"] = [_budget_line("y", budget_bytes / scale)]
    times = [point.step_s for point in points]
    if None not in times:
        data.append(_time_line(values, [float(seconds or 0) for seconds in times], layout))
    return {"data": data, "layout": layout}


def _time_line(values: Sequence[int], times: Sequence[float], layout: dict[str, Any]) -> Figure:
    """The step's time against an axis of its own, which `layout` gets."""
    scale, unit = time_unit_of(max(times))
    layout["yaxis2"] = {
        "title": {"text": unit},
        "overlaying": "y",
        "side": "right",
        "tickmode": "auto",
        "rangemode": "tozero",
        "showgrid": False,
    }
    line = _line("step", values, [seconds / scale for seconds in times], list(map(format_s, times)), _TIME)
    return line | {"yaxis": "y2", "line": {"color": _TIME, "dash": "dot", "width": 2}}


def _apart(values: Sequence[int]) -> list[int]:
    """Of ascending sizes those whose names do not run into one another on a logarithmic axis, the ends included."""
    kept = list(values[:1])
    for value in values[1:]:
        if value >= kept[-1] * (values[-1] / values[0]) ** _MIN_GAP:
            kept.append(value)
    if kept[-1] != values[-1]:
        kept[-1] = values[-1]
    return kept


def _line(name: str, values: Sequence[int], heights: list[float], texts: list[str], color: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(values),
        "y": heights,
        "customdata": texts,
        "hovertemplate": "%{customdata}",
        "line": {"color": color, "width": 2},
        "marker": {"size": 7},
    }


def _budget_line(axis: str, place: float) -> Figure:
    """A dashed line across the chart at one place of `axis`."""
    other = "y" if axis == "x" else "x"
    across = {f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1, f"{axis}0": place, f"{axis}1": place}
    return {"type": "line", **across, "line": {"color": BUDGET, "dash": "dash", "width": 1.5}}
