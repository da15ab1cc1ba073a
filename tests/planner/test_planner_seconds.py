"""The seconds that a plan predicts have all that a step does: beside kernels, what the host takes for each call."""

from __future__ import annotations

import pytest

import trainwright as tw
from tests.builders import price_of, task, tiny_program
from trainwright import optim
from trainwright.artifacts import Overheads
from trainwright.hardware import resolve
from trainwright.planner.best_first import solve_on
from trainwright.planner.costs.costs import cost_model
from trainwright.planner.problem.build import build_problem
from trainwright.profiler.saved import record
from trainwright.program.micro_batches import capture_step
from trainwright.torch_internals.private import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts the ATen calls that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2-tiny", pytest.param("t5-tiny", marks=pytest.mark.slow)])
def test_on_a_cpu_a_plan_counts_the_hosts_seconds_for_each_call_that_runs(name: str) -> None:
    model, batch = tw.zoo.build(name, device="cpu")

    def predicted_s(overheads: Overheads) -> float:
        return tw.plan(model, batch, hardware=on_host("cpu:1", overheads)).predicted.step_s

    plan = tw.plan(model, batch, hardware="cpu:1")
    module = tw.parallelize(model, plan)
    with Calls() as forward:
        loss = module(**plan.shard_batch(batch)).loss
    with Calls() as backward:
        loss.backward()
    plain_s = predicted_s(Overheads())
    assert predicted_s(Overheads(forward_s=1.0)) - plain_s == pytest.approx(forward.num, rel=0.1)
    # autograd adds up gradients and detaches them, which is no op's own
    assert 0.75 * backward.num < predicted_s(Overheads(backward_s=1.0)) - plain_s <= backward.num


@pytest.mark.parametrize("solver", ["fsdp", "joint"])
def test_calls_that_no_decision_changes_are_in_objective_and_price(solver: str) -> None:
    cluster = on_host("cpu:2", Overheads(forward_s=1e-3))
    (place,) = task(tiny_program("gpt2-tiny"), cluster=cluster).places
    answer, costs = solve_on(place, solver), place.problem.costs
    assert answer.objective_s == pytest.approx(price_of(place, answer.decisions), rel=1e-6)
    assert costs.fixed_s(place.problem.program) > 1e-3 * len(place.problem.program.params) == 28e-3


def test_an_op_has_no_more_calls_for_what_its_backward_keeps_being_noted() -> None:
    program = capture_step(*tw.zoo.build("gpt2-tiny"), None, None)
    records = record(program).by_op
    calls = {op.name: found.num_calls[0] for op, found in records.items()}
    assert (calls["gelu"], calls["layer_norm"], calls["embedding"]) == (1, 1, 1)
    assert all(found.saved_inputs for op, found in records.items() if op.name in {"gelu", "layer_norm"})


def test_on_a_gpu_the_host_runs_ahead_and_adds_nothing_to_a_plan() -> None:
    model, batch = tw.zoo.build("gpt2-tiny")
    plans = [
        tw.plan(model, batch, hardware=on_host("h100", overheads))
        for overheads in (Overheads(), Overheads(forward_s=1.0, backward_s=1.0, view_s=1.0))
    ]
    assert plans[0].predicted.step_s == plans[1].predicted.step_s


def on_host(hardware: str, overheads: Overheads):
    cluster = resolve(hardware)
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"overheads": overheads})})


def test_costs_on_a_mesh_do_not_depend_on_what_was_asked_of_another() -> None:
    """Of an op's parts, those known to communicate nothing on one mesh are not run again on the next."""
    assert costs_on((2, 2)) == costs_on((4,), (2, 2))


def costs_on(*meshes: tuple[int, ...]):
    """Return the costs of all options of a small GPT-2 on the last mesh, each asked by the same records in turn."""
    cluster, program = resolve("4xh100"), capture_step(*tw.zoo.build("gpt2-tiny"), None, None)
    records = record(program, "gpu")
    for mesh in meshes:
        costs = cost_model(program, cluster.device, cluster.mesh(mesh), records, 1.0)
        problem = build_problem(program, costs, optim.record("adamw"))
    return [(d.forward_s, d.backward_s, d.inner_comm_s, d.inner_bytes) for d in problem.groups]
