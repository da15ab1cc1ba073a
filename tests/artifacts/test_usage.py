"""Ordinary models and torch's optimizers, under every kind of plan, equal one process."""

from __future__ import annotations

from functools import cache

import pytest

import trainwright as tw
from tests import usage_cases
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.optim import torch_optimizers

CASES = "tests.usage_cases:"
ON_SHARDS = [entry.name for entry in torch_optimizers.records() if entry.name != "muon"]  # of matrices alone
QUICK = ["adamw", "sgd-momentum", "adagrad", "adadelta", "rprop"]
"""Of those whose states are alike one: moments, a momentum, sums, a step of its own, signs."""


@cache
def planned(solver: str, mesh: tuple[int, ...] = (2,), dropout: float = 0.0) -> str:
    model, batch = usage_cases.build(dropout)
    return tw.plan(model, batch, hardware=f"cpu:{2 * len(mesh)}", mesh=mesh, solver=solver).to_json()


def assert_equal(found: dict[str, object], bar: float = 1e-6) -> None:
    assert found["names"] == []
    assert found["values"] < 1e-7
    assert found["weights"] < bar
    assert found["frozen_as_it_was"]
    assert found["tied"]
    assert found["logits"]
    assert found["moved"] >= 14


def test_all_of_torchs_optimizers_are_here() -> None:
    assert set(ON_SHARDS) >= {
        "sgd", "sgd-momentum", "asgd", "adagrad", "adadelta", "rmsprop", "adam", "adamw", "adamax", "nadam", "radam",
    }  # fmt: skip


@pytest.mark.parametrize("optimizer", slow_but(QUICK, ON_SHARDS))
@pytest.mark.parametrize("solver", ["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_torchs_optimizers_on_plans(pool2: Pool, solver: str, optimizer: str) -> None:
    for found in pool2.run(CASES + "steps", plan=planned(solver), optimizer=optimizer):
        assert_equal(found)


@pytest.mark.parametrize("solver", ["ddp", "joint"])
def test_ordinary_models_on_plans(pool2: Pool, solver: str) -> None:
    for found in pool2.run(CASES + "steps", plan=planned(solver), optimizer="sgd"):
        assert_equal(found, 1e-10)


@pytest.mark.slow
def test_ordinary_models_on_two_axes(pool4: Pool) -> None:
    for found in pool4.run(CASES + "steps", plan=planned("joint", (2, 2)), optimizer="sgd"):
        assert_equal(found, 1e-10)


@pytest.mark.parametrize("name", ["lbfgs", "SparseAdam"])
def test_optimizers_that_no_plan_can_run_are_refused(name: str) -> None:
    with pytest.raises(tw.UserError, match=f"{name!r}.*(closure|sparse)"):
        tw.plan(*usage_cases.build(), hardware="cpu:2", optimizer=name)


@pytest.mark.parametrize("solver", slow_but(["megatron"], ["ddp", "fsdp", "megatron", "joint"]))
def test_dropout_depends_on_the_seed_and_the_step_alone(pool2: Pool, solver: str) -> None:
    ranks = pool2.run(CASES + "dropped", plan=planned(solver, dropout=0.3))
    for found in ranks:
        assert found["same"], "losses and gradients, to the bit"
        assert found["other"]
        assert found["each_step"]
        assert found["goes_on"]
    assert ranks[0]["losses"] == ranks[1]["losses"]


def test_a_loss_of_several_outputs(pool2: Pool) -> None:
    model, batch = usage_cases.two_headed()
    plan = tw.plan(model, batch, hardware="cpu:2", solver="joint", loss_fn=usage_cases.two_losses)
    for found in pool2.run(CASES + "with_loss_fn", plan=plan.to_json()):
        assert found["loss"] < 1e-12
        assert found["gradients"] < 1e-12
        assert found["outputs"] == 2
