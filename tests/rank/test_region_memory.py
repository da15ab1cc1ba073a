"""Behind a backward nothing stays that only reruns needed, and a second backward is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.builders import make_optimizer, tiny_program
from tests.grids import slow_but
from tests.plans import random_decisions
from tests.tier_cases import gpt2, module_of
from trainwright.artifacts import UserError
from trainwright.planner.costs.simulate import simulate
from trainwright.profiler.tracker import MemoryTracker
from trainwright.rank import step_hooks
from trainwright.rank.step_hooks import before_each_step

RANDOM_STATES = 64
"""The bytes of the generators' states that reruns of dropout begin from, kept with the loss."""


def left_behind(name: str, seed: int, recompute: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes that are there behind the backward, but for parameters, gradients, buffers and optimizer states."""
    seen: list[int] = []
    phase = MemoryTracker.phase

    @contextmanager
    def noting(tracker: MemoryTracker, name: str) -> Iterator[None]:
        with phase(tracker, name):
            yield
            if name == "backward":
                seen.append(tracker._by_category["saved"] + tracker._by_category["other"])

    program = tiny_program(name)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryTracker, "phase", noting)
        simulate(program, random_decisions(program, (2,), seed, recompute), make_optimizer)
    return seen[-1]


@pytest.mark.parametrize(
    ("name", "seed"),
    slow_but(
        [("gpt2-tiny", 0), ("t5-tiny", 3)], [("gpt2-tiny", 0), ("gpt2-tiny", 1), ("llama-tiny", 2), ("t5-tiny", 3)]
    ),
)
def test_what_a_rerun_starts_from_goes_with_it(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = left_behind(name, seed, 0.0, monkeypatch)
    assert 0 < left_behind(name, seed, 0.8, monkeypatch) <= outputs + RANDOM_STATES


def test_a_second_backward_of_one_forward_is_refused() -> None:
    loaded = gpt2()
    plan = tw.plan(loaded.model, loaded.batch, hardware="cpu:1", memory="1.4MiB")
    assert plan.predicted.recompute_s > 0
    module, _ = module_of(plan, None)
    loss = module(**plan.shard_batch(loaded.batch)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="run the forward again, or plan with more memory"):
        loss.backward()


def test_an_owner_may_go_while_torch_goes_through_hooks() -> None:
    """The garbage collector may run anywhere, so a hook whose owner is gone stays until the next one is made."""

    class Owner:
        def step(self, *_: Any) -> None:
            owners.clear()  # the last of them among the hooks that are gone through

    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    owners = [Owner(), Owner()]
    for owner in owners:
        before_each_step(owner.step)
    del owner
    optimizer.step()
    assert len(step_hooks._ownerless) == 2
    last = Owner()
    before_each_step(last.step).remove()
    assert not step_hooks._ownerless
