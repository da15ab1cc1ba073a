"""Plans drawn at random from the whole strategy space compute what one process computes."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.grids import slow_but
from tests.plans import random_decisions
from tests.pool import Pool
from trainwright.capture.cached import cached_capture
from trainwright.models import zoo
from trainwright.program.program import build_program
from trainwright.rank.instructions import Borrow
from trainwright.rank.local import build_local
from trainwright.rank.reshard import SimulatedCommunicator

MODELS = ["gpt2-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "t5-tiny"]
TWO_AXES = ("resnet-tiny",)
"""On two axes the others are slow tests."""


@pytest.mark.parametrize("seed", slow_but([0], [0, 1]))
@pytest.mark.parametrize("model", slow_but(["gpt2-tiny"], MODELS))
def test_on_two_ranks(pool2: Pool, model: str, seed: int) -> None:
    report = pool2.run("tests.parallel_cases:random_plan", timeout_s=280, model=model, mesh=[2], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.parametrize(
    ("model", "seed"), slow_but([("gpt2-tiny", 12)], [("gpt2-tiny", 12), ("bert-tiny", 5), ("t5-tiny", 4)])
)
def test_with_a_copy_that_several_regions_read(pool2: Pool, model: str, seed: int) -> None:
    program = build_program(cached_capture(*zoo.build(model, device="meta")))
    local = build_local(program, random_decisions(program, (2,), seed), SimulatedCommunicator((2,)))
    assert any(isinstance(found, Borrow) for found in local.instructions), "one that is lent is what is tested"
    report = pool2.run("tests.parallel_cases:random_plan", timeout_s=280, model=model, mesh=[2], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.parametrize(
    "model", [*TWO_AXES, *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS if m not in TWO_AXES)]
)
def test_on_a_two_axis_mesh(pool4: Pool, model: str) -> None:
    report = pool4.run("tests.parallel_cases:random_plan", timeout_s=280, model=model, mesh=[2, 2], seed=7)[0]
    assert report["passed"], report


@pytest.mark.parametrize("model", ["gpt2-tiny", pytest.param("t5-tiny", marks=pytest.mark.slow)])
def test_on_four_ranks(pool4: Pool, model: str) -> None:
    report = pool4.run("tests.parallel_cases:random_plan", timeout_s=280, model=model, mesh=[4], seed=3)[0]
    assert report["passed"], report


@pytest.mark.parametrize(
    ("model", "mesh"), slow_but([("gpt2-tiny", [2, 1, 2])], [("gpt2-tiny", [2, 1, 2]), ("llama-tiny", [2, 2, 1])])
)
def test_on_a_three_axis_mesh(pool4: Pool, model: str, mesh: list[int]) -> None:
    report = pool4.run("tests.parallel_cases:random_plan", timeout_s=280, model=model, mesh=mesh, seed=11)[0]
    assert report["passed"], report


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
def test_on_eight_ranks_in_three_axes(model: str) -> None:
    with closing(Pool(8)) as pool:
        report = pool.run("tests.parallel_cases:random_plan", timeout_s=290, model=model, mesh=[2, 2, 2], seed=5)[0]
    assert report["passed"], report
