"""Models that users write run under plans as in one process: of the solver, and drawn at random."""

from __future__ import annotations

import sys

import pytest

import trainwright as tw
from tests.grids import slow_but
from tests.models import plain
from tests.pool import Pool
from tests.user_model_cases import built

CASES = "tests.user_model_cases:"
NAMES = [build.__name__ for build in plain.GOOD]
QUICK = (
    "build_lstm",
    "build_bags",
    "build_graph",
    "build_spectral",
    "build_timed",
    "build_pairs",
    "build_translated",
    "build_tables",
    "build_informed",
    "build_rotated",
    "build_modes",
)
"""Models with ops that no other model of these tests has."""
ALL = slow_but(QUICK[1:], NAMES)


SOLVED = ("build_spectral", "build_modes", "build_timed", "build_rotated")


@pytest.mark.parametrize("name", slow_but(SOLVED, NAMES))
def test_a_plan_of_the_solver(pool2: Pool, name: str) -> None:
    model, batch, *loss_fn = built(name)
    plan = tw.plan(model, batch, loss_fn=loss_fn[0] if loss_fn else None, hardware="cpu:2")
    report = pool2.run(CASES + "verified", plan=plan.to_json(), name=name)[0]
    assert report["passed"], report
    assert max(report["peak_bytes"]) == pytest.approx(plan.predicted.peak_bytes, rel=0.01, abs=64)


@pytest.mark.parametrize(
    ("name", "seed"),
    slow_but([(name, 0) for name in QUICK[1::2]], [(name, seed) for name in NAMES for seed in range(4)]),
)
def test_plans_drawn_at_random(pool2: Pool, name: str, seed: int) -> None:
    report = pool2.run(CASES + "random_plan", name=name, mesh=[2], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.parametrize("seed", range(2))
def test_a_rank_without_a_part_sends_complex_numbers_too(pool4: Pool, seed: int) -> None:
    """Three examples on four ranks: the last has none, and its transforms meet those of the others."""
    report = pool4.run(CASES + "random_plan", name="build_spectral", mesh=[4], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.parametrize("seed", [1, 4])
def test_what_is_recomputed_is_read_as_it_was_saved(pool2: Pool, seed: int) -> None:
    """A conjugate, a negative and complex numbers in the memory of real ones, of values that are not kept."""
    report = pool2.run(CASES + "random_plan", name="build_rotated", mesh=[2], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.parametrize("seed", [27, 40])
def test_a_rank_without_a_head_meets_the_others_for_the_bias_of_all(pool4: Pool, seed: int) -> None:
    """Two heads on four ranks: those without one have no part in attention, and in the sums of the gradients behind it."""
    report = pool4.run(CASES + "random_plan", name="build_biased", mesh=[2, 2], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.parametrize("seed", [0, 4])
def test_a_rank_without_input_channels_has_a_share_of_zeros(pool4: Pool, seed: int) -> None:
    """Three channels on four ranks; the biases' gradients are whole on each of them all the same."""
    report = pool4.run(CASES + "random_plan", name="build_coloured", mesh=[4], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system has to list the threads of a process")
def test_plans_one_after_the_other_share_their_groups(pool4: Pool) -> None:
    threads = pool4.run(CASES + "threads_with_more_plans", name="build_bags")[0]
    assert threads[-1] == threads[0], "each group of processes has threads that live as long as the process"
