"""The stages of a plan: as rows for the terminal and the page, and as a picture of who does what when."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

from ..artifacts import Plan
from .figures import BUDGET, Figure, time_unit_of, unit_of
from .units import format_bytes, format_s

_HEADERS = ("stage", "begins at", "in flight", "forward", "backward", "reruns", "update", "busy", "peak")
_OFFLOADED = "offloaded"
"""The heading of what leaves the device in a step, which stands before the peak where anything does."""
_COLORS = {
    "forward": "#4c78a8",
    "backward": "#f2a541",
    "weight": "#e3d26f",
    "send": "#9aa5b1",
    "begin": "#b9c4cf",
    "reduce": "#b279a2",
    "tied": "#d67195",
    "update": "#54a24b",
}
_NAMES = {
    "weight": "gradients of weights",
    "begin": "before the step",
    "reduce": "sums of gradients",
    "tied": "sums of tied parameters",
}


class ShownSpan(Protocol):
    """One stretch of time of one stage."""

    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def micro(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


class ShownSchedule(Protocol):
    """A simulated step."""

    @property
    def step_s(self) -> float: ...
    @property
    def spans(self) -> Sequence[ShownSpan]: ...


def stage_headers(plan: Plan) -> tuple[str, ...]:
    """Return the headings of `stage_rows`."""
    return (*_HEADERS[:-1], *((_OFFLOADED,) if _offloads(plan) else ()), _HEADERS[-1])


def _offloads(plan: Plan) -> bool:
    return any(stage.moved_bytes for stage in plan.predicted.stages)


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row a stage: seconds of a micro-batch, of the update, the share of the step that it is busy, and its bytes."""
    if plan.pipeline is None:
        return []
    begins, num = ("the first op", *plan.pipeline.begins), plan.num_stages
    pieces = [", ".join(begins[stage::num]) for stage in range(num)]
    rows = zip(pieces, plan.pipeline.in_flight, plan.predicted.stages)
    return [
        (
            str(number),
            begin,
            str(depth),
            format_s(stage.forward_s),
            format_s(stage.backward_s),
            format_s(stage.recompute_s),
            format_s(stage.update_s),
            f"{100 * min(1.0, stage.busy_s(plan.micro_batches) / plan.predicted.step_s):.0f} %",
            *((format_bytes(stage.moved_bytes),) if _offloads(plan) else ()),
            format_bytes(stage.peak_bytes),
        )
        for number, (begin, depth, stage) in enumerate(rows)
    ]


def bubble_text(plan: Plan) -> str:
    """Return what of a step the busiest stage waits, in words."""
    predicted = plan.predicted
    share = 100 * predicted.bubble_s / predicted.step_s
    return f"{_order(plan)}the busiest stage waits {format_s(predicted.bubble_s)}, {share:.2g} % of a step"


def _order(plan: Plan) -> str:
    """Name the order in which stages work, where it is not the usual one."""
    pipeline = plan.pipeline
    if pipeline is not None and pipeline.virtual > 1:
        return f"stages are interleaved, {pipeline.virtual} pieces each; "
    return "the backward is split (zero bubble); " if pipeline is not None and pipeline.split_backward else ""


def schedule_figure(schedule: ShownSchedule) -> Figure:
    """Return a line a stage with what it does when; what is empty it waits."""
    scale, unit = time_unit_of(schedule.step_s)
    kinds = [kind for kind in _COLORS if any(span.kind == kind for span in schedule.spans)]
    stages = sorted({span.stage for span in schedule.spans})
    data = []
    for kind in kinds:
        own = [span for span in schedule.spans if span.kind == kind]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _NAMES.get(kind, kind),
                "y": [f"stage {span.stage}" for span in own],
                "base": [span.start_s / scale for span in own],
                "x": [(span.end_s - span.start_s) / scale for span in own],
                "text": [str(span.micro) if span.micro >= 0 else "" for span in own],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "constraintext": "inside",
                "textangle": 0,
                "hovertemplate": [_hover(span) + "<extra></extra>" for span in own],
                "marker": {"color": _COLORS[kind], "line": {"color": "white", "width": 0.5}},
            }
        )
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": {"title": {"text": unit}, "range": [0, schedule.step_s / scale], "showgrid": False},
        "yaxis": {"autorange": "reversed", "categoryarray": [f"stage {stage}" for stage in stages]},
        "legend": {"orientation": "h", "y": 1.05, "yanchor": "bottom", "x": 0},
        "margin": {"t": 50, "r": 20, "l": 70, "b": 50},
        "height": 150 + 46 * len(stages),
    }
    return {"data": data, "layout": layout}


def _hover(span: ShownSpan) -> str:
    of = f" of micro-batch {span.micro}" if span.micro >= 0 else ""
    return escape(
        f"stage {span.stage}: {span.kind}{of}, {format_s(span.end_s - span.start_s)} from {format_s(span.start_s)}"
    )


def stage_memory_figure(plan: Plan) -> Figure:
    """Return the peak of each stage beside the budget."""
    peaks = [stage.peak_bytes for stage in plan.predicted.stages]
    scale, unit = unit_of(max(peaks))
    names = [f"stage {number}" for number in range(len(peaks))]
    data: list[dict[str, object]] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [peak / scale for peak in peaks],
            "text": [format_bytes(peak) for peak in peaks],
            "hovertemplate": "%{y}: %{text}<extra></extra>",
            "showlegend": False,
            "marker": {"color": "#4c78a8"},
        }
    ]
    shapes = []
    if plan.budget_bytes is not None and plan.budget_bytes < 3 * max(peaks):
        at = plan.budget_bytes / scale
        shapes = [
            {
                "type": "line",
                "x0": at,
                "x1": at,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": BUDGET, "dash": "dot"},
            }
        ]
    layout = {
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed"},
        "shapes": shapes,
        "margin": {"t": 20, "r": 20, "l": 70, "b": 50},
        "height": 120 + 34 * len(peaks),
    }
    return {"data": data, "layout": layout}
