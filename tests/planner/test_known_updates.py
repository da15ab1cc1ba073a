"""What an update holds is followed once for all plans with the same parts: every simulation is as if it were not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.builders import tiny_program
from tests.grids import slow_but
from tests.plans import random_decisions
from trainwright import optim
from trainwright.planner.costs.known_updates import KnownUpdates, OtherGradientsError, Update
from trainwright.planner.costs.simulate import Simulation, simulate
from trainwright.profiler.tracker import MemoryTracker, Target

MESH = (2, 2)
CASES = [("adamw", "gpt2-tiny"), ("lion", "gpt2-tiny"), ("adam8bit", "resnet-tiny")]


def seen(found: Simulation) -> tuple[Any, ...]:
    return found.peak_bytes, found.peak_at, found.breakdown, found.comm_bytes, found.comm_calls, found.num_calls


@pytest.mark.parametrize("target", slow_but(["cpu"], ["cpu", "gpu"]))
@pytest.mark.parametrize(("name", "model"), slow_but(CASES[:1], CASES))
def test_a_simulation_is_the_same_whether_its_update_is_known(name: str, model: str, target: Target) -> None:
    program, known = tiny_program(model), KnownUpdates()

    def make(params):
        return optim.create(name, params)

    for seed in (0, 1):
        drawn = random_decisions(program, MESH, seed)
        kept = replace(drawn, recomputed=frozenset())
        for decisions in (drawn, kept):
            alone = simulate(program, decisions, make, target=target)
            assert seen(simulate(program, decisions, make, target=target, known=known)) == seen(alone)
    assert len(known.steps) == len(known.state_bytes) == 2


def test_the_optimizer_is_made_once_for_plans_with_the_same_parts() -> None:
    program, known, made = tiny_program("gpt2-tiny"), KnownUpdates(), []
    decisions = random_decisions(program, MESH, 0)
    for _ in range(3):
        simulate(program, decisions, lambda params: made.append(1) or optim.create("adamw", params), known=known)  # type: ignore[func-returns-value]
    assert len(made) == 1


class Sometimes(torch.optim.SGD):
    """Holds twice as much in a step where a gradient is missing, and something for good from its third step on."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Sometimes.num_steps += 1
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        held = [torch.empty(1000 * (1 + len(params) - len(grads))) for _ in grads]
        if Sometimes.num_steps > 2:
            self.state[params[0]]["more"] = torch.empty(10)
        del held


def updated(known: KnownUpdates | None, has_gradient: bool) -> MemoryTracker:
    params = [(name, nn.Parameter(torch.zeros(3))) for name in "ab"]
    tracker = MemoryTracker()
    with tracker:
        update = Update(Sometimes, params, tracker, known=known)  # type: ignore[arg-type]
        update.warm_up()
        tracker.reset_peak()
        params[0][1].grad = torch.zeros(3)
        if has_gradient:
            params[1][1].grad = torch.zeros(3)
        update.step()
    return tracker


def test_gradients_that_were_not_seen_are_followed_when_they_are_simulated_again() -> None:
    def peak(known: KnownUpdates | None, has_gradient: bool) -> tuple[Any, ...]:
        Sometimes.num_steps = 0
        found = updated(known, has_gradient)
        return found.peak_bytes, found.peak_at, found.peak_breakdown, found.num_ops

    known = KnownUpdates()
    both, one = peak(None, True), peak(None, False)
    assert both != one
    assert [peak(known, True) for _ in range(2)] == [both, both]
    with pytest.raises(OtherGradientsError):
        peak(known, False)
    assert [peak(known, has_gradient) for has_gradient in (False, False, True)] == [one, one, both]


def test_a_step_that_leaves_something_is_followed_each_time() -> None:
    known = KnownUpdates()
    for _ in range(2):
        Sometimes.num_steps = 1
        updated(known, True)
    assert not known.steps
    assert not known.state_bytes
