"""Layouts for stages: points of the hull of seconds and bytes, none of them forgotten; what mixtures could gain, by brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import trainwright as tw
from benchmarks.planner.pipeline_layouts import Mixed, Mixture
from tests.pipeline_tables import random_table
from trainwright.artifacts import Refusal
from trainwright.planner.pipeline.cuts import all_cuts, depths
from trainwright.planner.pipeline.frontier import Level
from trainwright.planner.pipeline.layouts import MOST_PRICED, _Priced
from trainwright.planner.pipeline.search import Case
from trainwright.planner.pipeline.table import Table
from trainwright.planner.task import Task
from trainwright.request import PlanRequest


def case_of(name: str, hardware: str, num_stages: int, inner: int, memory: int) -> Case:
    model, batch = tw.zoo.build(name)
    asked = PlanRequest(
        model, batch, hardware=hardware, pipeline=num_stages, mesh=inner, micro_batches=4, memory=memory
    )
    task = Task(**asked.question())
    return Case(task, task.cluster, num_stages, (inner,))


def test_prices_find_points_of_the_hull() -> None:
    place = case_of("gpt2-tiny", "2x4xh100", 2, 4, 2**30).place
    settings = place.settings("joint")
    priced = _Priced(place.solver, settings)
    fastest = place.solver.without_memory(settings).values
    assert fastest is not None
    points = [priced.point(fastest), *priced.hull(fastest)]
    assert 2 < len(points) <= MOST_PRICED + 1
    points.sort(key=lambda point: -point.num_bytes)
    for (a, b), (_, c) in itertools.pairwise(itertools.pairwise(points)):
        slope, next_slope = (
            (slow.seconds - fast.seconds) / (fast.num_bytes - slow.num_bytes) for fast, slow in ((a, b), (b, c))
        )
        assert 0 < slope < next_slope
    for price in (0.0, *(10.0**-k for k in range(9, 15))):  # nothing is below the hull's own lines
        found = priced.cheapest(price)
        assert found is not None
        below = points if len(points) <= MOST_PRICED else [points[0], points[-1]]
        assert min(p.seconds + price * p.num_bytes for p in below) >= (found.seconds + price * found.num_bytes) * (
            1 - 1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "memory", "alone"),
    [
        ("gpt2-tiny", {"batch_size": 16, "seq_len": 128}, 2_450_304, range(4)),
        ("gpt2", {"batch_size": 64, "seq_len": 512, "dtype": "bf16"}, 608_030_925, [3, 5]),
    ],
)
def test_no_layouts_are_faster_alone(
    name: str, options: dict[str, Any], memory: int, alone: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is not passed over for what it estimates: the search is no slower than one that knows one of its layouts alone."""
    model, batch = tw.zoo.build(name, **options)

    def step_s() -> float:
        try:
            plan = tw.plan(
                model, batch, hardware="2x4xh100", pipeline=2, mesh=4, micro_batches=4 if name == "gpt2-tiny" else 8,
                memory=memory, pipeline_schedule="1f1b", loss_chunks="none",
            )  # fmt: skip
        except Refusal:
            return math.inf
        return plan.predicted.step_s

    found, all_layouts, num = step_s(), Case.layouts, 0
    for at in alone:
        monkeypatch.setattr(Case, "layouts", lambda self, at=at: all_layouts(self)[at : at + 1])
        own_s = step_s()
        num += math.isfinite(own_s)
        assert found <= own_s * (1 + 1e-9)
    assert num


def other_layouts(table: Table, seed: int) -> Table:
    """The same units under other layouts: slower ones that hold less, each to another degree."""
    rng = random.Random(seed)

    def more() -> float:
        return rng.uniform(1.0, 1.4)

    levels = tuple(
        tuple(Level(level.kept_bytes * less, level.rerun_s * slower, level.rederived_bytes * less) for level in own)
        for own in table.levels
        for less, slower in [(rng.uniform(0.3, 1.0), more())]
    )
    units = tuple(
        replace(unit, forward_s=unit.forward_s * more(), backward_s=unit.backward_s * more()) for unit in table.units
    )
    params = {
        name: replace(own, held_bytes=own.held_bytes * rng.uniform(0.3, 1.0)) for name, own in table.params.items()
    }
    return replace(table, units=units, levels=levels, params=params, excess_bytes={}, _fits={}, _frontiers={})


@pytest.mark.parametrize("seed", range(25))
def test_program_over_layouts_and_cuts_is_a_bound(seed: int) -> None:
    """No cuts and layouts take less than the program says; what it proposes, and moves, reach nearly the fastest of all."""
    first = replace(random_table(seed), overlaps=True)
    tables = [first, other_layouts(first, seed), other_layouts(first, seed + 1000)]
    budget = random.Random(seed).uniform(60, 200)
    mixture = Mixture(tables, budget)
    for depth in depths(first.num_stages, first.num_micro_batches)[:2]:
        every = [
            mixture.judge(cuts, depth, choice)
            for cuts in all_cuts(len(first.units), first.num_stages)
            for choice in itertools.product(range(len(tables)), repeat=first.num_stages)
        ]
        best = min(every, key=lambda mixed: mixed.step_s)
        bound_s, proposed = mixture.program(depth)
        if math.isinf(best.step_s):
            assert proposed is None
            continue
        assert bound_s <= best.step_s * (1 + 1e-9)
        assert bound_s >= best.step_s * 0.7
        assert proposed is not None
        found = mixture.moved(proposed, depth)
        assert isinstance(found, Mixed)
        assert best.step_s * (1 - 1e-9) <= found.step_s <= best.step_s * 1.05
