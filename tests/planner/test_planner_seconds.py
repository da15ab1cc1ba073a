"""The seconds that a plan predicts have all that a step does: beside kernels, what the host takes for each call."""

from __future__ import annotations

import pytest

import trainwright as tw
from trainwright import optim
from trainwright.artifacts import Overheads
from trainwright.hardware import resolve
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
