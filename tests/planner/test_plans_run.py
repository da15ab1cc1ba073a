"""Every solver's plan for every tiny model of the zoo: the same maths as one process, in the memory promised."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import trainwright as tw
from tests.builders import check_on_ranks, run_on_ranks, spec_of
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.capture.cached import cached_capture
from trainwright.program.program import build_program

SLOW_ONLY = (
    "qwen3-tiny",
    "olmo-2-tiny",
    "gemma-3-tiny",
    "mamba-2-tiny",
    "qwen3-moe-tiny",
    "deepseek-v3-tiny",
    "gpt-oss-tiny",
)
MODELS = ["gpt2-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "t5-tiny", "mixtral-tiny", *SLOW_ONLY]
JOINT_IN_CI = {"gpt2-tiny", "resnet-tiny"}
"""Attention and convolutions; test_random_plans.py has an encoder with a decoder, test_expert_plans.py experts."""
IN_SINGLE = {"gpt2-tiny", "resnet-tiny"}
"""Products and convolutions: what single precision may change."""
SOME = [name if name in IN_SINGLE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


SOLVERS = ["ddp", "fsdp", "megatron", "two-stage", "joint"]


def case(model: str, solver: str):
    """Of those that are no slow tests: joint plans, and Megatron's; other tests run GPT-2 by each other recipe."""
    in_ci = ["megatron", "joint"] if model == "gpt2-tiny" else ["joint"]
    is_slow = solver not in in_ci or model not in JOINT_IN_CI
    return pytest.param(model, solver, marks=pytest.mark.slow if is_slow else ())


@cache
def planned(model: str, solver: str, mesh: tuple[int, ...], share: float | None) -> tw.Plan:
    """A plan; `share` is its budget as a share of what plain data parallelism takes.

    It is asked whether a plan runs as it says, not how good it is: a few seconds of search find one.
    """
    loaded = tw.load_model(spec_of(model))
    num_ranks = 1
    for size in mesh:
        num_ranks *= size
    question = {"hardware": f"cpu:{num_ranks}", "mesh": mesh, "model_ref": loaded.ref, "time_limit_s": 4.0}
    memory = None
    if share is not None:
        memory = int(share * planned(model, "ddp", mesh, None).predicted.peak_bytes)
    return tw.plan(loaded.model, loaded.batch, solver=solver, memory=memory, **question)


@pytest.mark.parametrize(("model", "solver"), [case(model, solver) for model in MODELS for solver in SOLVERS])
def test_on_two_ranks(pool2: Pool, model: str, solver: str) -> None:
    check_on_ranks(pool2, model, planned(model, solver, (2,), None))


@pytest.mark.slow  # the tests below and those of micro-batches run joint plans within tight budgets of smaller models
@pytest.mark.parametrize("model", MODELS)
def test_a_tight_joint_plan(pool2: Pool, model: str) -> None:
    verify = run_on_ranks if model == "resnet-tiny" else check_on_ranks
    verify(pool2, model, planned(model, "joint", (2,), 0.8))


@pytest.mark.parametrize("solver", slow_but(["joint"], ["fsdp", "joint"]))
def test_tensors_made_on_the_way_are_of_the_precision_that_is_verified(pool2: Pool, solver: str) -> None:
    """`torch.zeros(n)` in a forward is of the default type: in float64 it has to become one of float64."""
    model = "tests/models/plain.py:build_messages"
    check_on_ranks(pool2, model, planned(model, solver, (2,), None if solver == "fsdp" else 0.9))


def test_recurrent_cells_are_split_over_samples(pool2: Pool) -> None:
    plan = planned("tests/models/plain.py:build_cells", "fsdp", (2,), None)
    cells = [module.split for key, module in plan.modules.items() if "_cell" in key]
    assert len(cells) == 12
    assert set(cells) == {("b",)}
    assert not any("no rule" in note for note in plan.notes)
    check_on_ranks(pool2, "tests/models/plain.py:build_cells", plan)


def test_losses_are_split_over_samples(pool2: Pool) -> None:
    plan = planned("tests/models/plain.py:build_losses", "fsdp", (2,), None)
    losses = {key: module.split for key, module in plan.modules.items() if "loss" in key or "cross_entropy" in key}
    assert len(losses) == 10
    assert losses.pop(":margin_ranking_loss#2") == ("-",), "a mean over more entries than its first argument has"
    assert set(losses.values()) == {("t",), ("d0",)}, losses
    assert [note for note in plan.notes if "no rule" in note and "margin_ranking_loss" not in note] == []
    run_on_ranks(pool2, "tests/models/plain.py:build_losses", plan)


@pytest.mark.parametrize("loop", slow_but(["o"], ["i", "o"]))
def test_the_peak_of_convolutions_split_by_channels(pool2: Pool, loop: str) -> None:
    loaded = tw.load_model("zoo:resnet-tiny")
    pin = f"*layer.*convolution=shard({loop})@cpu"
    plan = tw.plan(loaded.model, loaded.batch, hardware="cpu:2", mesh=(2,), pins=[pin], model_ref=loaded.ref)
    assert any(module.split == (loop,) for key, module in plan.modules.items() if "convolution" in key)
    check_on_ranks(pool2, "resnet-tiny", plan)


@pytest.mark.parametrize("model", SOME)
def test_in_single_precision(pool2: Pool, model: str) -> None:
    check_on_ranks(pool2, model, planned(model, "joint", (2,), None), dtype="fp32")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_on_two_axes(pool4: Pool, model: str) -> None:
    check_on_ranks(pool4, model, planned(model, "joint", (2, 2), 0.8))


@pytest.mark.slow  # every recipe by every model, on one of the meshes each
@pytest.mark.parametrize(
    ("model", "mesh", "solver"),
    [
        (model, ((2, 2), (4,))[(place + turn) % 2], solver)
        for place, model in enumerate(MODELS)
        for turn, solver in enumerate(["ddp", "fsdp", "megatron", "two-stage"])
    ],
    ids=str,
)
def test_on_four_ranks(pool4: Pool, model: str, mesh: tuple[int, ...], solver: str) -> None:
    check_on_ranks(pool4, model, planned(model, solver, mesh, None))


def test_an_op_without_a_rule_is_gathered_and_said_to_be() -> None:
    class Exponential(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(self.linear(x)).mean()

    plan = tw.plan(Exponential(), (torch.ones(8, 4),), hardware="cpu:2")
    (note,) = [note for note in plan.notes if "matrix_exp" in note]
    assert re.search(r"whole, gathered tensors, [\d.e-]+ ms of the step", note)


@pytest.mark.parametrize("model", slow_but([*MODELS[:1], *MODELS[2:7], "mamba-2-tiny", "deepseek-v3-tiny"], MODELS))
def test_no_op_of_the_zoo_is_merely_gathered(model: str) -> None:
    loaded = tw.load_model(f"zoo:{model}")
    program = build_program(cached_capture(loaded.model, loaded.batch))
    unknown = {op.name for op in program.ops if not op.constant and not op.signature.known}
    assert not unknown
    assert len(program.ops) > 20
