"""Conjugate gradients against a dense solve, and Armijo's condition by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.numerics.cg import CGOutcome, cg
from trainwright.numerics.linesearch import armijo
from trainwright.numerics.seeds import seeded


def system(num_dims: int, seed: int, condition: float) -> tuple[torch.Tensor, torch.Tensor]:
    draw = seeded(seed)
    basis = torch.linalg.qr(torch.randn(num_dims, num_dims, generator=draw, dtype=torch.float64)).Q
    spectrum = torch.logspace(0, math.log10(condition), num_dims, dtype=torch.float64)
    return basis @ torch.diag(spectrum) @ basis.T, torch.randn(num_dims, generator=draw, dtype=torch.float64) + 3


@given(st.integers(1, 30), st.integers(0, 50), st.sampled_from([1.0, 30.0, 1e4]))
def test_cg_solves_what_a_dense_solver_solves(num_dims: int, seed: int, condition: float) -> None:
    matrix, rhs = system(num_dims, seed, condition)
    found = cg(lambda vector: matrix @ vector, rhs, rtol=1e-11)
    assert found.converged
    torch.testing.assert_close(found.x, torch.linalg.solve(matrix, rhs), rtol=1e-6, atol=1e-9)
    assert abs((rhs - matrix @ found.x).norm() - found.residual_norm) < 1e-10 * rhs.norm() * condition


def test_a_warm_start_and_a_preconditioner_save_products() -> None:
    matrix, rhs = system(60, 1, 1e4)
    scale = torch.logspace(0, 2, 60, dtype=torch.float64)
    stretched = scale[:, None] * matrix * scale
    plain = cg(lambda vector: stretched @ vector, rhs, rtol=1e-9)
    scaled = cg(lambda vector: stretched @ vector, rhs, rtol=1e-9, preconditioner=lambda r: r / scale**2)
    warm = cg(lambda vector: stretched @ vector, rhs, rtol=1e-9, x0=torch.linalg.solve(stretched, rhs))
    assert warm.num_steps <= 1
    assert scaled.num_steps < 0.8 * plain.num_steps


def test_cg_says_how_it_ended() -> None:
    matrix, rhs = system(20, 2, 1e6)
    short = cg(lambda vector: matrix @ vector, rhs, max_steps=3)
    assert (short.outcome, short.num_steps) == (CGOutcome.MAX_STEPS, 3)
    assert "allow more steps" in short.outcome.value
    saddle = torch.tensor([2.0, -1.0])
    bent = cg(lambda vector: saddle * vector, torch.tensor([1.0, 1.0]) * 3)
    assert bent.outcome is CGOutcome.NEGATIVE_CURVATURE
    assert bent.direction is not None
    assert float(bent.direction @ (saddle * bent.direction)) <= 0
    assert cg(lambda vector: vector * math.nan, rhs).outcome is CGOutcome.NOT_FINITE
    assert cg(lambda vector: vector, torch.zeros(3)).num_steps == 0
    with pytest.raises(ValueError, match=r"one dimension; got shape \(2, 1\)"):
        cg(lambda vector: vector, torch.ones(2, 1))


@given(st.floats(0.01, 100), st.floats(0.1, 0.9), st.floats(0.01, 0.9), st.floats(0.05, 50))
def test_the_step_is_the_first_that_meets_the_condition(
    step: float, shrink: float, sufficient: float, bend: float
) -> None:
    def value_at(length: float) -> float:
        return 7.0 - 2.0 * length + bend * length**2

    found = armijo(value_at, 7.0, -2.0, step=step, shrink=shrink, sufficient=sufficient, max_trials=10000)
    assert found.accepted
    steps = [step]
    while len(steps) < found.num_trials:
        steps.append(steps[-1] * shrink)
    meets = [value_at(length) <= 7.0 + sufficient * length * -2.0 for length in steps]
    assert meets == [False] * (found.num_trials - 1) + [True]
    assert found.step == steps[-1]
    assert found.value == value_at(found.step)


def test_a_search_that_fails_says_so() -> None:
    uphill = armijo(lambda step: 1.0 + step, 1.0, -1.0, step=1.0, max_trials=5)
    assert (uphill.accepted, uphill.num_trials, uphill.step) == (False, 5, 0.5**4)
    floored = armijo(lambda step: math.nan, 1.0, -1.0, step=1.0, min_step=0.3)
    assert (floored.accepted, floored.step) == (False, 0.5)
    with pytest.raises(ValueError, match="slope < 0; got slope 0"):
        armijo(lambda step: step, 0.0, 0.0, step=1.0)
    with pytest.raises(ValueError, match=r"shrink in \(0, 1\)"):
        armijo(lambda step: step, 0.0, -1.0, step=1.0, shrink=1.0)
