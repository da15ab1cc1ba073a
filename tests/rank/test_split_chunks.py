"""A loss in chunks computes what one process computes with whole logits, in float64, however rows and classes are split."""

from __future__ import annotations

import pytest

from tests.grids import slow_but
from tests.pool import Pool

ON_TWO: list[tuple[str, list[str], int, int]] = [
    ("gpt2-tiny", ["v"], 3, 1),
    ("shifted", ["t.0"], 4, 1),
    ("llama-tiny", ["t.1"], 5, 2),
    ("gpt2-tiny", ["t.0"], 1, 2),
    ("transposed", ["t.1"], 2, 1),
    ("shifted", ["v"], 2, 1),
    ("bert-tiny", ["v"], 4, 2),
    ("t5-tiny", ["t.0"], 4, 1),
    ("llama-tiny", ["-"], 64, 1),
]
ON_FOUR: list[tuple[str, list[int], list[str], int, int]] = [
    ("gpt2-tiny", [2, 2], ["t.1", "v"], 3, 1),
    ("llama-tiny", [2, 2], ["v", "t.0"], 4, 2),
    ("shifted", [4], ["v"], 3, 1),
    ("llama-tiny", [4], ["v"], 4, 1),
    ("llama-tiny", [2, 2], ["t.0", "t.1"], 2, 1),
    ("gpt2-tiny", [2, 2], ["v", "v"], 5, 1),
]


@pytest.mark.parametrize(("kind", "split", "chunks", "micro_batches"), slow_but(ON_TWO[:2], ON_TWO))
def test_on_two_ranks(pool2: Pool, kind: str, split: list[str], chunks: int, micro_batches: int) -> None:
    report = pool2.run(
        "tests.chunk_cases:forced", timeout_s=280, kind=kind, mesh=[2], split=split, seed=5, chunks=chunks,
        micro_batches=micro_batches,
    )[0]  # fmt: skip
    assert report["passed"], report
    assert max(report["max_relative_error_gradient"], report["max_relative_error_loss"]) < 1e-12


@pytest.mark.parametrize(("kind", "mesh", "split", "chunks", "micro_batches"), slow_but([], ON_FOUR))
def test_on_four_ranks(
    pool4: Pool, kind: str, mesh: list[int], split: list[str], chunks: int, micro_batches: int
) -> None:
    report = pool4.run(
        "tests.chunk_cases:forced", timeout_s=280, kind=kind, mesh=mesh, split=split, seed=3, chunks=chunks,
        micro_batches=micro_batches,
    )[0]  # fmt: skip
    assert report["passed"], report
    assert max(report["max_relative_error_gradient"], report["max_relative_error_loss"]) < 1e-12


@pytest.mark.parametrize("kind", slow_but(["divided"], ["divided", "by_token"]))
def test_whole_logits_whose_loss_is_read_again(pool2: Pool, kind: str) -> None:
    report = pool2.run("tests.chunk_cases:forced", kind=kind, mesh=[2], split=["v"], seed=5, chunks=0)[0]
    assert report["passed"], report
    assert max(report["max_relative_error_gradient"], report["max_relative_error_loss"]) < 1e-12
