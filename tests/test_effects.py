"""What a forward writes is written once a step, however much of it the backward reruns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainwright as tw
from tests import effect_cases
from tests.pool import Pool

BAR = 1e-12


def check(worst: dict[str, float]) -> None:
    assert {what: error for what, error in worst.items() if not error < BAR} == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_step_on_one_rank_is_the_models_own(seed: int) -> None:
    plan = effect_cases.random_plan(seed, 1)
    assert any(entry.recomputed for entry in plan.modules.values())
    check(effect_cases.as_one_process(plan.to_json()))


def test_two_forwards_before_a_step_write_twice() -> None:
    check(effect_cases.as_one_process(effect_cases.random_plan(0, 1).to_json(), accumulate=2))


@pytest.mark.parametrize("seed", range(2))
def test_a_step_on_two_ranks_is_one_processes(pool2: Pool, seed: int) -> None:
    plan = effect_cases.random_plan(seed, 2).to_json()
    for worst in pool2.run("tests.effect_cases:as_one_process", plan=plan):
        check(worst)


def test_a_recomputed_batch_norm_updates_its_statistics_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2)).double()
    batch, loss_fn = (torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 1, 0])), nn.CrossEntropyLoss()
    plan = tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:1", solver="ddp", pins=("1:batch_norm=recompute",))
    assert plan.modules["1:batch_norm"].recomputed
    module = tw.parallelize(model, plan, loss_fn=loss_fn)
    module(*batch).loss.backward()
    loss_fn(model(batch[0]), batch[1]).backward()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(dict(module.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)
