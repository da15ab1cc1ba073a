"""Explains why a plan's stages begin where they do: the price of moving each cut while the others stay.

Places near a cut are ranked by the table; the next best is then run on fake tensors and priced as a plan is. Where it does not fit
so, the one behind it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...artifacts import ExplainedCut, Plan
from ...program.decisions import Decisions
from ...program.stages import cut
from ..task import Place
from .cuts import Cuts, Judge, Staged
from .measure import Measured, Outline, measure_as_decided
from .price import hops_of, price_stages
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
    if place.problem.costs.tier is not None:
        measured = measured.offloading(place.problem.costs.tier)
    cuts = tuple(outline.names.index(name) + 1 for name in plan.pipeline.begins)
    table = measured.table.scheduled(plan.pipeline.virtual, plan.pipeline.split_backward)
    _learn(plan, table, cuts, measured.levels_of(decisions))
    usable = place.task.usable_bytes
    around = _Around(plan, place, measured, Judge(table, math.inf if usable is None else usable), cuts)
    return tuple(around.explained(stage) for stage in range(1, plan.pipeline.num_pieces))


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


@dataclass(frozen=True, eq=False)
class _Around:
    """A plan's cuts, and what it takes to price others near them."""

    plan: Plan
    place: Place
    measured: Measured
    judge: Judge
    cuts: Cuts

    def explained(self, stage: int) -> ExplainedCut:
        """Return the fastest other unit near at which a stage could begin, as simulated."""
        names, pipeline = self.measured.outline.names, self.plan.pipeline
        assert pipeline is not None
        edges = (0, *self.cuts, len(names) + 1)
        low, high = edges[stage - 1] + 1, edges[stage + 1] - 1
        own = self.cuts[stage - 1]
        near = [unit for unit in range(max(low, own - FURTHEST), min(high, own + FURTHEST) + 1) if unit != own]
        found: list[tuple[float, int, Staged]] = []
        for unit in near:
            other = self.judge.judge((*self.cuts[: stage - 1], unit, *self.cuts[stage:]), pipeline.in_flight)
            if other is not None:
                found.append((other.step_s, unit, other))
        for _, unit, other in sorted(found, key=lambda row: row[:2]):
            step_s = self._simulated_s(other)
            if step_s is not None:
                extra_s = step_s - self.plan.predicted.step_s
                return ExplainedCut(stage, pipeline.begins[stage - 1], names[unit - 1], extra_s, len(near))
        return ExplainedCut(stage, pipeline.begins[stage - 1], None, None, len(near))

    def _simulated_s(self, other: Staged) -> float | None:
        """Return the simulated seconds of a step of other cuts; None if a stage holds more than the budget."""
        table, task = self.judge.table, self.place.task
        levels = [level for own in table.by_piece(other.cuts, other.fits) for level in own]
        priced = price_stages(
            self.place,
            cut(task.program, self.measured.begins(other.cuts)),
            self.measured.staged(levels),
            table.schedule(other.in_flight),
            hops_of(self.plan.cluster, self.plan.num_stages),
            self.measured.runs,
        )
        return priced.predicted.step_s if priced.predicted.peak_bytes <= self.judge.budget_bytes else None
