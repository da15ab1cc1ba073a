"""Peaks of stages that are put together of what their actions add, against all micro-batches of a stage run at once."""

from __future__ import annotations

import random

import pytest

import trainwright as tw
from trainwright.planner.pipeline.cuts import depths_of
from trainwright.planner.pipeline.price import adds_up, simulate_stages
from trainwright.planner.pipeline.search import Case
from trainwright.planner.task import Task
from trainwright.program.stages import cut
from trainwright.request import PlanRequest


def compare(name: str, hardware: str, num_stages: int, inner: int, num_micro: int, offload: str = "none") -> int:
    """Hold both against each other at every depth and in every order, with random cuts and levels; return how often."""
    model, batch = tw.zoo.build(name)
    asked = PlanRequest(
        model, batch, hardware=hardware, pipeline=num_stages, mesh=inner, micro_batches=num_micro, offload=offload
    ).question()
    task = Task(**asked)
    case, rng, num = Case(task, task.cluster, num_stages, (inner,)), random.Random(0), 0
    moved = 0
    measured = case.measured(case.layouts()[0])
    tier = case.place.problem.costs.tier
    if tier is not None:
        measured = measured.offloading(tier)
    for judge in case.judges(measured):
        table = judge.table
        for in_flight in depths_of(table):
            cuts = sorted(rng.sample(range(1, len(table.units)), table.num_pieces - 1))
            levels = [rng.randrange(len(table.levels[unit.kind])) for unit in table.units]
            decisions, schedule = measured.staged(levels), table.schedule(in_flight)
            pieces = cut(case.task.program, measured.begins(cuts))
            stages = [pieces[stage::num_stages] for stage in range(num_stages)]
            whole = simulate_stages(case.place, stages, decisions, schedule, {}, in_full=True)
            added = simulate_stages(case.place, stages, decisions, schedule, {}, in_full=False)
            for one, other in zip(whole, added, strict=True):
                if adds_up(pieces, schedule):
                    assert one.peak_bytes == other.peak_bytes, (name, in_flight, schedule)
                    assert one.breakdown == other.breakdown
                    assert one.peak_at == other.peak_at
                    num += 1
                else:
                    assert other.peak_bytes == pytest.approx(one.peak_bytes, rel=0.05)
                assert one.comm_bytes == other.comm_bytes
                assert one.moved_bytes == other.moved_bytes
                moved += one.moved_bytes
    assert (moved > 0) == (tier is not None)
    return num


@pytest.mark.slow  # on each change: those below, which add what offloads
def test_stages_hold_what_their_actions_add() -> None:
    assert compare("gpt2-tiny", "4xh100", 2, 2, 4) >= 16


@pytest.mark.slow  # tests/runtime/test_pipeline.py measures such a peak
def test_stages_that_offload_hold_what_their_actions_add() -> None:
    assert compare("gpt2-tiny", "2xh100", 2, 1, 4, "host") >= 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hardware", "num_stages", "inner", "offload"),
    [
        ("t5-tiny", "2x2xh100", 4, 1, "none"),
        ("llama-tiny", "cpu:4", 2, 2, "none"),
        ("gpt2-tiny", "cpu:4", 2, 2, "none"),
        ("t5-tiny", "2x2xh100", 4, 1, "host"),
        ("llama-tiny", "cpu:4", 2, 2, "disk"),
        ("mixtral-tiny", "4xh100", 2, 2, "host"),
    ],
)
def test_stages_hold_what_their_actions_add_in_more_models(
    name: str, hardware: str, num_stages: int, inner: int, offload: str
) -> None:
    assert compare(name, hardware, num_stages, inner, 4, offload) >= 12
