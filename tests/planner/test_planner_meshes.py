"""Which mesh: the fastest of all that may be laid over the links; three axes; what stays unseen is said."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch

from tests.builders import Blocks, blocks_program, question, task, tiny_program
from tests.grids import slow_but
from tests.planner_ranks import run_ranks, shard, whole_values
from trainwright.artifacts import Refusal
from trainwright.capture.cached import cached_capture
from trainwright.hardware import resolve
from trainwright.planner import make_plan
from trainwright.planner.best_first import solve_on
from trainwright.planner.forms import spaces_of
from trainwright.planner.meshes import mesh_shapes
from trainwright.planner.model.sharding import is_plain
from trainwright.planner.search.effort import GAP
from trainwright.planner.variants import Variants
from trainwright.planner.ways import Ways
from trainwright.profiler.saved import whole_program
from trainwright.program.program import build_program

SMALL, LARGE = 1_100_000, 10**9


def best_of_each(program, hardware, **options):
    """The fastest plan of every single mesh."""
    steps = {}
    for shape in mesh_shapes(resolve(hardware)):
        try:
            steps[shape] = make_plan(**question(program, hardware, mesh=shape, **options)).predicted.step_s
        except Refusal:
            continue
    return steps


@pytest.mark.parametrize(
    ("name", "budget"), slow_but([("blocks", LARGE)], [("blocks", LARGE), ("gpt2-tiny", LARGE), ("gpt2-tiny", SMALL)])
)
def test_the_mesh_is_the_fastest_of_all(name, budget):
    program = blocks_program(3, 2048) if name == "blocks" else tiny_program(name)
    steps = best_of_each(program, "2x2xh100", budget_bytes=budget)
    assert len(steps) >= 2
    found = make_plan(**question(program, "2x2xh100", mesh=None, budget_bytes=budget, time_limit_s=240.0))
    assert found.predicted.step_s <= min(steps.values()) * 1.006
    assert found.predicted.peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_mesh_is_the_fastest_of_all_where_latencies_are_shared():
    program = tiny_program("gpt2-tiny")
    options = {"budget_bytes": 1_700_000, "time_limit_s": 120.0}
    steps = best_of_each(program, "cpu:4", **options)
    found = make_plan(**question(program, "cpu:4", mesh=None, **options))
    assert found.predicted.step_s <= min(steps.values()) * 1.02


@pytest.fixture
def searched(monkeypatch):
    """The spaces that are searched, with the seconds that each may take."""
    found, solve = [], Ways._solve

    def noted(self, settings):
        found.append((self, settings.deadline.limited(settings.time_limit_s)))
        return solve(self, settings)

    monkeypatch.setattr(Ways, "_solve", noted)
    return found


def test_a_mesh_that_cannot_win_is_not_solved(searched):
    plan = make_plan(**question(tiny_program("gpt2-tiny"), "4xh100", mesh=None, time_limit_s=240.0))
    shapes = {space.place.shape for space, _ in searched}
    assert not plan.solver.unseen_meshes
    first, other = searched[0][0].place, task(tiny_program("gpt2-tiny"), "4xh100", mesh=(2, 2)).places[0]
    assert first.shape == "4"
    assert ("2x2" in shapes) == (other.solver.lower_bound_s() < searched[0][0].known.step_s * (1 - GAP))


@pytest.mark.parametrize("few_ops", [200, 0])
def test_wherever_memory_binds_fsdp_is_searched_by_itself(searched, monkeypatch, few_ops):
    """Rows may count too much of its plans in the search of everything, in short and in long programs."""
    monkeypatch.setattr("trainwright.planner.problem.problem.FEW_OPS", few_ops)
    (place,) = task(blocks_program(2, 2048), "2xh100", mesh=(2,), budget_bytes=220_000).places
    assert solve_on(place, "joint").binds
    assert any(space.is_beside for space, _ in searched)
    searched.clear()
    place.task.budget_bytes = None
    assert not solve_on(place, "joint").binds
    assert not any(space.is_beside for space, _ in searched)


@pytest.mark.slow  # test_planner_together.py asks it of deadlines without a search
def test_no_mesh_takes_more_than_half_of_the_time_that_is_left(searched):
    limit_s = 240.0
    make_plan(
        **question(tiny_program("gpt2-tiny"), "2x2xh100", mesh=None, time_limit_s=limit_s, budget_bytes=2_000_000)
    )
    first_ways = [seconds for space, seconds in searched if space.turn == 0]
    assert len(first_ways) > 1
    assert all(seconds <= limit_s / 2 for seconds in first_ways)


def test_a_small_model_is_looked_at_on_every_mesh_however_busy_the_machine_is(monkeypatch):
    """What one mesh takes is counted: neither a slow clock nor what the first use of a library takes makes the next one harder."""
    clock = itertools.count(0, 0.01)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    plan = make_plan(**question(tiny_program("gpt2-tiny"), "8xh100", mesh=None, budget_bytes=None))
    assert not plan.solver.unseen_meshes


def test_meshes_that_nobody_looked_at_are_named():
    plan = make_plan(**question(tiny_program("gpt2-tiny"), "8xh100", mesh=None, time_limit_s=1e-3))
    assert plan.mesh == {"gpu": 8}, "the cluster's own is always looked at"
    assert plan.solver.unseen_meshes == ("2x4", "2x2x2")
    assert any("not searched: mesh 2x4, 2x2x2" in note and "--time-limit" in note for note in plan.notes)


def test_pins_name_the_axes_of_the_clusters_own_mesh():
    plan = make_plan(**question(tiny_program("gpt2-tiny"), "4xh100", mesh=None, pins=("h.*.attn:sdpa=shard(b0)@gpu",)))
    assert plan.mesh == {"gpu": 4}


def test_megatron_tries_every_width_of_its_last_axis():
    spaces = spaces_of(task(tiny_program("gpt2-tiny"), "8xh100", mesh=None), "megatron")
    assert [space.place.shape for space in spaces] == ["8", "2x4", "4x2"]


@pytest.mark.slow  # a search on three axes
def test_changes_of_layout_on_three_axes_are_plain():
    (place,) = task(tiny_program("gpt2-tiny"), "8xh100", mesh=(2, 2, 2)).places
    _, sharding = place.solver.plain()
    assert sharding.flow
    assert all(is_plain(native, want[0]) for _, native, want in sharding.flow)
    answer = solve_on(place, "joint")
    assert answer.gap <= 0.02
    one_axis = solve_on(task(tiny_program("gpt2-tiny"), "8xh100", mesh=(8,)).places[0], "ddp")
    assert answer.objective_s <= one_axis.objective_s * 1.02, "data parallelism is there on any mesh"


@pytest.mark.slow  # test_random_plans.py has plans on three axes
def test_gradients_on_three_axes_are_those_of_one_process():
    torch.manual_seed(0)
    model, batch = Blocks(2).double(), (torch.randn(64, 6, dtype=torch.float64),)
    program = build_program(cached_capture(model, batch, lambda out, _: out))
    values = whole_values(program, model, {"0": batch[0]})
    loss, gradients = run_ranks(program, whole_program(program).decisions, values)
    (place,) = task(program, "cpu:8", mesh=(2, 2, 2)).places
    answers = [solve_on(place, "joint"), solve_on(place, "fsdp"), place.solver.smallest(place.settings("joint"))]
    assert len({str(sorted(map(str, answer.decisions.params.values()))) for answer in answers}) > 1
    for answer in answers:
        found_loss, found = run_ranks(program, answer.decisions, values)
        assert found_loss == pytest.approx(loss, rel=1e-12)
        for tensor in program.params:
            whole = gradients[tensor.key][0][1]
            for coords, part in found[tensor.key]:
                wanted = shard(tensor, whole, answer.decisions.params[tensor], (2, 2, 2), coords)
                torch.testing.assert_close(part, wanted, rtol=1e-9, atol=1e-12)


def test_a_number_of_micro_batches_keeps_what_its_question_asks():
    """Forms of one question share the programs: not the budget, the sampled share or the stages of whoever asked first."""
    programs = {2: tiny_program("gpt2-tiny")}
    variants = Variants((1, 2), programs.__getitem__)
    asked = task(tiny_program("llama-tiny"), "cpu:2", budget_bytes=10**6, variants=variants)
    others = [replace(asked, budget_bytes=2 * 10**6), replace(asked, offload="none"), replace(asked, pipeline="auto")]
    found = [variants.task_of(each, 2) for each in (asked, *others)]
    assert [each.budget_bytes for each in found] == [10**6, 2 * 10**6, 10**6, 10**6]
    assert [each.pipeline for each in found] == [None, None, None, "auto"]
    assert all(each.program is programs[2] and each.records is found[0].records for each in found)
    assert variants.task_of(asked, 2) is found[0], "with what it has built"
