"""What a training script does with a parallel module, on two ranks: steps, clipping, evaluation, weights, checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import trainwright as tw
from tests.pool import Pool
from trainwright.models import zoo

CASES = "tests.runtime_cases:"


@cache
def planned(name: str, solver: str, num_ranks: int = 2) -> str:
    model, batch = zoo.build(name, dtype="fp64")
    return tw.plan(model, batch, hardware=f"cpu:{num_ranks}", solver=solver).to_json()


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        pytest.param("gpt2-tiny", "fsdp", marks=pytest.mark.slow),
        ("gpt2-tiny", "joint"),
        pytest.param("resnet-tiny", "joint", marks=pytest.mark.slow),
        pytest.param("t5-tiny", "fsdp", marks=pytest.mark.slow),
        pytest.param("resnet-tiny", "fsdp", marks=pytest.mark.slow),
        pytest.param("t5-tiny", "joint", marks=pytest.mark.slow),
    ],
)
def test_training_and_evaluation_equal_one_process(pool2: Pool, name: str, solver: str) -> None:
    clip = 0.0 if name == "t5-tiny" else 0.1
    found = pool2.run(CASES + "steps_equal_one_process", plan=planned(name, solver), name=name, clip=clip)[0]
    if name == "t5-tiny":  # its dropout is no module that the reference could switch off: only the names are compared
        assert found["num_keys"] == 0
        return
    assert found["num_keys"] == 0
    assert found["weights"] < 1e-8
    assert found["eval"] < 2e-6  # the model itself takes its loss in fp32


def test_a_meta_model_is_initialised_alike_under_any_plan(pool2: Pool) -> None:
    one, other = (
        pool2.run(CASES + "initialised_alike", plan=planned("llama-tiny", solver), name="llama-tiny")[0]
        for solver in ("ddp", "fsdp")
    )
    assert one["sums"] == pytest.approx(other["sums"])
    assert all(value > 0 for key, value in one["sums"].items() if key.endswith("proj.weight"))
    real = {key: float(value.double().sum()) for key, value in zoo.build("llama-tiny", device="cpu")[0].named_buffers()}
    assert len(real) >= 1
    assert one["buffers"] == pytest.approx(real)
    assert other["local"] < 0.7 * one["local"]


def test_weights_are_read_from_safetensors(pool2: Pool, tmp_path: Path) -> None:
    plan = planned("llama-tiny", "joint")
    assert pool2.run(CASES + "weights_from_file", plan=plan, name="llama-tiny", folder=str(tmp_path)) == [0.0, 0.0]


@pytest.mark.parametrize("solver", [pytest.param("ddp", marks=pytest.mark.slow), "joint"])
def test_dropout_is_reproducible(pool2: Pool, solver: str) -> None:
    found = pool2.run(CASES + "dropout_is_reproducible", plan=planned("gpt2-tiny", solver), name="gpt2-tiny")[0]
    assert found["same"] == 0.0
    assert found["gradients"] == 0.0
    assert found["other"] > 1e-6


def test_more_ranks_than_the_plan_has_are_refused(pool2: Pool) -> None:
    with pytest.raises(tw.UserError, match="4 ranks are needed"):
        pool2.run(CASES + "steps_equal_one_process", plan=planned("gpt2-tiny", "ddp", 4), name="gpt2-tiny")


def test_another_models_plan_is_refused(pool2: Pool) -> None:
    with pytest.raises(tw.UserError, match="fingerprint"):
        pool2.run(CASES + "steps_equal_one_process", plan=planned("gpt2-tiny", "ddp"), name="llama-tiny")
