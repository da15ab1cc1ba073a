"""Sync methods in loops that call the optimizer themselves: Hugging Face's Trainer and Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.pool import Pool
from trainwright import sync
from trainwright.artifacts import UserError
from trainwright.launch import init

CASES = "tests.sync_integration_cases:"


def test_accelerate_does_what_a_loop_by_hand_does(pool2: Pool) -> None:
    found = pool2.run(CASES + "by_accelerate")
    assert all(rank["same"] and rank["unwrapped"] for rank in found)
    assert found[0]["apart"] != found[1]["apart"]  # a step after the last round, whose gradients nobody summed
    assert found[0]["together"] == found[1]["together"]
    assert [rank["rounds"] for rank in found] == [1, 1]
    assert [rank["saved"] for rank in found] == [4, 4]


def test_the_trainer_exchanges_as_the_method_says(pool2: Pool, tmp_path: Path) -> None:
    found = pool2.run(CASES + "by_trainer", folder=str(tmp_path))
    assert found[0]["apart"] != found[1]["apart"]
    assert found[0]["together"] == found[1]["together"]
    assert [(rank["steps"], rank["rounds"]) for rank in found] == [(4, 1), (4, 1)]


def test_a_state_goes_on_and_an_optimizers_alone_is_refused() -> None:
    init("cpu")
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = sync.create("local-sgd", model, optimizer, period=2).as_optimizer()
    model(torch.ones(3, 2)).mean().backward()
    wrapped.step()
    saved = wrapped.state_dict()
    again = sync.create("local-sgd", model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), period=2)
    other = again.as_optimizer()
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    assert again.method.num_steps == 1
    assert len(other.state) == len(again.method.replica.optimizer.state) == 2
    with pytest.raises(UserError, match="that of a sync method is needed"):
        other.load_state_dict(optimizer.state_dict())


def test_methods_of_closures_are_refused() -> None:
    init("cpu")
    model = nn.Linear(2, 1)
    byte = sync.create("just-one-byte", model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="just-one-byte takes a closure; write the loop"):
        byte.as_optimizer()
