"""Explains why a plan's stages begin where they do: the price of moving each cut while the others stay."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...artifacts import ExplainedCut, Plan
from ...program.decisions import Decisions
from ..task import Place
from .cuts import Judge, Staged
from .measure import Outline, measure_as_decided
from .price import hops_of
from .table import Spans, Table

FURTHEST = 3
"""The number of units to either side of a cut that are tried."""


def explain_cuts(plan: Plan, place: Place, decisions: Decisions) -> tuple[ExplainedCut, ...]:
    """Return, for each stage but the first, the second best unit to begin at, with the reruns of all stages chosen anew.

    `place` is the task on one stage's ranks.
    """
    assert plan.pipeline is not None
    outline = Outline(place.task.program)
    hops = hops_of(plan.cluster, plan.num_stages)
    measured = measure_as_decided(place.problem, outline, decisions, hops, plan.cluster.device.kind)
    cuts = tuple(outline.names.index(name) + 1 for name in plan.pipeline.begins)
    table = measured.table.scheduled(plan.pipeline.virtual, plan.pipeline.split_backward)
    _learn(plan, table, cuts, measured.levels_of(decisions))
    usable = place.task.usable_bytes
    judge = Judge(table, math.inf if usable is None else usable)
    own = judge.judge(cuts, plan.pipeline.in_flight)
    now_s = plan.predicted.step_s if own is None else own.step_s
    return tuple(
        _explained(plan, judge, outline.names, cuts, stage, now_s) for stage in range(1, plan.pipeline.num_pieces)
    )


def _learn(plan: Plan, table: Table, cuts: tuple[int, ...], levels: Sequence[int]) -> None:
    """Make the table learn the peaks that the plan predicts for its stages."""
    assert plan.pipeline is not None
    over: dict[tuple[bool, bool], tuple[float, Spans]] = {}
    depths = table.depths(plan.pipeline.in_flight)
    for spans, depth, stage in zip(table.stages(cuts), depths, plan.predicted.stages):
        own = [level for first, stop in spans for level in levels[first:stop]]
        row = stage.peak_bytes - table.peak_bytes(spans, depth, own), spans
        over[table.ends(spans)] = max(over.get(table.ends(spans), row), row)
    for excess, spans in over.values():
        table.learn(spans, excess)


def _explained(
    plan: Plan, judge: Judge, names: Sequence[str], cuts: tuple[int, ...], stage: int, now_s: float
) -> ExplainedCut:
    assert plan.pipeline is not None
    edges = (0, *cuts, len(names) + 1)
    low, high = edges[stage - 1] + 1, edges[stage + 1] - 1
    own = cuts[stage - 1]
    near = [unit for unit in range(max(low, own - FURTHEST), min(high, own + FURTHEST) + 1) if unit != own]
    found: list[tuple[float, int, Staged]] = []
    for unit in near:
        other = judge.judge((*cuts[: stage - 1], unit, *cuts[stage:]), plan.pipeline.in_flight)
        if other is not None:
            found.append((other.step_s, unit, other))
    best = min(found, key=lambda row: row[:2], default=None)
    return ExplainedCut(
        stage=stage,
        begins=plan.pipeline.begins[stage - 1],
        other=None if best is None else names[best[1] - 1],
        extra_s=None if best is None else best[0] - now_s,
        num_tried=len(near),
    )
