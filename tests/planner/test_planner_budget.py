"""Plans of models with many layers under a budget that binds: it is used, the gap is small, the file can be reviewed."""

from __future__ import annotations

import functools
import json

import pytest

import trainwright as tw
from benchmarks.planner.grid import solved, violations
from tests.builders import NUM_LAYERS, blocks_program, deep_program, peaks, question, task
from tests.grids import slow_but
from trainwright.artifacts import Plan
from trainwright.models import zoo
from trainwright.planner import make_plan
from trainwright.planner.best_first import solve_on


@functools.cache
def planned(share: float, num_layers: int = NUM_LAYERS) -> Plan:
    """A plan within a budget between the smallest plan's peak (0) and the fastest plan's (1)."""
    low, high = peaks(num_layers)
    return within(deep_program(num_layers), int(low + share * (high - low)))


def within(program, budget_bytes: int) -> Plan:
    """A plan within a budget; the time is ample, since on a loaded machine the search would else end where the clock does."""
    return make_plan(**question(program, "2xh100", budget_bytes=budget_bytes, time_limit_s=150.0, offload="none"))


@pytest.mark.slow  # a short program stands for them below
@pytest.mark.parametrize(("share", "num_layers"), [(0.9, 2), *((share, NUM_LAYERS) for share in (0.2, 0.9))])
def test_a_budget_that_binds_is_used(share, num_layers):
    check_that_the_budget_is_used(planned(share, num_layers))


def test_a_budget_that_binds_is_used_in_a_short_program():
    program = blocks_program(4, 4096)
    (place,) = task(program, "2xh100", mesh=(2,)).places
    low = place.solver.smallest(place.settings("joint")).simulation.peak_bytes
    high = solve_on(place, "joint").simulation.peak_bytes
    check_that_the_budget_is_used(within(program, int(low + 0.7 * (high - low))))


def check_that_the_budget_is_used(plan: Plan) -> None:
    assert 0.95 * plan.budget_bytes <= plan.predicted.peak_bytes <= plan.budget_bytes
    assert plan.solver.gap <= 5e-3  # of all row budgets, those included that let in what does not fit
    assert plan.predicted.recompute_s > 0


def test_the_problem_does_not_grow_with_depth():
    sizes = []
    for num_layers in (4, NUM_LAYERS):
        (place,) = task(deep_program(num_layers), "2xh100").places
        model, *_ = place.solver.full()
        sizes.append((model.num_columns, model.num_rows))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("solver", slow_but(["fsdp"], ["fsdp", "joint"]))
def test_a_plan_can_be_reviewed(solver):
    plan = planned(0.9) if solver == "joint" else make_plan(**question(deep_program(2), "2xh100"), solver=solver)
    lines = plan.to_json().splitlines()
    assert json.loads("\n".join(lines))
    assert len(lines) < 300
    assert max(map(len, lines)) <= 160, max(lines, key=len)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_of_seventy_billion_parameters_can_be_reviewed():
    model, batch = zoo.build("llama-3-70b", dtype="bf16", batch_size=64, seq_len=8192)
    plan = tw.plan(model, batch, hardware="8x8xh100", memory="70GiB", mesh=(8, 8), time_limit_s=8.0)
    lines = plan.to_json().splitlines()
    assert len(lines) < 300
    assert max(map(len, lines)) <= 160, max(lines, key=len)


@pytest.mark.slow  # of the other models and clusters, the grid's own record says it
@pytest.mark.timeout(1800)
def test_from_the_smallest_budget_on_time_falls_with_memory_and_joint_is_no_slower_than_any_recipe():
    rows = list(solved("gpt2", "2x2xh100"))
    assert any("step_s" in row and row["binds"] for row in rows)
    assert violations(rows) == []
