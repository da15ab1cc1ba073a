"""A planned module that is no longer used is gone at once, with its memory: no cycle waits for Python's garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import trainwright as tw


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


LOSS: dict[str, Any] = {"loss_fn": lambda out, _: out.square().mean()}
BATCH = (torch.ones(64, 64),)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"micro_batches": 2}, id="micro-batches"),
        pytest.param({"memory": "260KiB", "offload": "disk"}, id="offloaded", marks=pytest.mark.slow),
    ],
)
def test_a_dropped_module_leaves_nothing_behind(no_collection, asked):
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())))
    plan = tw.plan(model, BATCH, hardware="cpu:1", **LOSS, **asked)
    module = tw.parallelize(model, plan, **LOSS)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        module(*plan.shard_batch(BATCH)).loss.backward()
        optimizer.step()
    gone = [weakref.ref(each) for each in (module, *module.parameters())]
    del module, optimizer
    assert [ref() is None for ref in gone] == [True] * len(gone)
