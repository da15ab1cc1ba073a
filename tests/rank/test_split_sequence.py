"""Attention split along the sequence computes what one process computes, in float64, under every kind of mask."""

from __future__ import annotations

from typing import Any

import pytest

import trainwright as tw
from tests.pool import Pool
from tests.sequence_cases import attention_groups, program_of
from trainwright.artifacts import UserError
from trainwright.models import zoo

ON_TWO: list[tuple[str, list[str], dict[str, Any]]] = [
    ("llama-tiny", ["q"], {"seq_len": 7}),
    ("packed", ["q"], {}),
    ("qwen3-tiny", ["q"], {"micro_batches": 2}),
    ("gemma-3-tiny", ["q"], {}),
    ("banded", ["q"], {}),
]
ON_FOUR: list[tuple[str, list[int], list[str], dict[str, Any]]] = [
    ("llama-tiny", [2, 2], ["q", "h"], {}),
    ("llama-tiny", [4], ["q"], {"seq_len": 5}),
    ("llama-tiny", [2, 2], ["q", "q"], {"seq_len": 9}),
    ("llama-tiny", [2, 2], ["h", "q"], {"recompute": 1.0}),
    ("llama-tiny", [2, 2], ["b0", "q"], {"micro_batches": 2}),
    ("gemma-3-tiny", [2, 2], ["q", "h"], {}),
    ("bert-tiny", [2, 2], ["q", "h"], {}),
    ("packed", [4], ["q"], {}),
    ("banded", [2, 2], ["q", "q"], {}),
    ("open", [2, 2], ["h", "q"], {}),
]


def _slow_but(fast: int, cases: list) -> list:
    return [pytest.param(*case, marks=[pytest.mark.slow] if place != fast else []) for place, case in enumerate(cases)]


@pytest.mark.parametrize(("kind", "split", "settings"), _slow_but(1, ON_TWO))
def test_on_two_ranks(pool2: Pool, kind: str, split: list[str], settings: dict[str, Any]) -> None:
    report = pool2.run(
        "tests.sequence_cases:forced", timeout_s=280, kind=kind, mesh=[2], split=split, seed=5, **settings
    )[0]
    assert report["passed"], report
    assert max(report["max_relative_error_gradient"], report["max_relative_error_loss"]) < 1e-12


@pytest.mark.parametrize(("kind", "mesh", "split", "settings"), _slow_but(0, ON_FOUR))
def test_on_four_ranks(pool4: Pool, kind: str, mesh: list[int], split: list[str], settings: dict[str, Any]) -> None:
    report = pool4.run(
        "tests.sequence_cases:forced", timeout_s=280, kind=kind, mesh=mesh, split=split, seed=3, **settings
    )[0]
    assert report["passed"], report
    assert max(report["max_relative_error_gradient"], report["max_relative_error_loss"]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mesh", [[4], [2, 2]])
def test_random_plans(pool4: Pool, mesh: list[int], seed: int) -> None:
    model = ("llama-tiny", "qwen3-tiny", "gemma-3-tiny")[seed % 3]
    report = pool4.run("tests.parallel_cases:random_plan", timeout_s=280, model=model, mesh=mesh, seed=seed)[0]
    assert report["passed"], report


@pytest.mark.slow  # test_random_plans.py holds the peaks of other splits
def test_peaks_are_as_predicted(pool2: Pool) -> None:
    """The rows that came, and what became of them, are held for the backward."""
    plan = tw.plan(
        *zoo.build("llama-tiny", batch_size=1, seq_len=64), hardware="cpu:2", pins=("*self_attn:sdpa=shard(q)@cpu",)
    )
    assert {op.split for key, op in plan.modules.items() if key.endswith(":sdpa")} == {("q",)}
    report = pool2.run(
        "tests.sequence_cases:reported", timeout_s=280, kind="llama-tiny", plan=plan.to_json(), batch_size=1, seq_len=64
    )[0]
    assert report["passed"], report
    for measured in report["peak_bytes"]:
        assert abs(report["predicted_peak_bytes"] - measured) < 0.002 * measured, report


def test_dropped_weights_keep_the_queries_whole_and_say_so() -> None:
    (group, *_) = attention_groups(program_of("gpt2-tiny"))
    assert [loop.name for loop in group.loops if loop.whole and loop.name == "q"]
    with pytest.raises(UserError, match="drops weights"):
        tw.plan(*zoo.build("gpt2-tiny"), hardware="cpu:2", pins=("*attn:sdpa=shard(q)@cpu",))
