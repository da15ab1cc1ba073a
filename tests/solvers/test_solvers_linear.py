"""Relaxation against dense linear algebra, and the tuners on the stream of systems they are made for."""

from __future__ import annotations

import functools
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import brentq, lsq_linear
from scipy.sparse import linalg as sparse_linalg

from trainwright.artifacts import UserError
from trainwright.solvers.linear import (
    OMEGAS,
    ChebCB,
    TsallisINF,
    TsallisINFCB,
    Tuner,
    optimal_omega,
    solve_sor,
    solve_ssor_pcg,
    solve_stream,
    sor,
    ssor_pcg,
)
from trainwright.solvers.linear.cheb_cb import box_least_squares
from trainwright.solvers.linear.sweep import LowerSweep
from trainwright.solvers.linear.tsallis_inf import tsallis_weights
from trainwright.solvers.outcome import Status

Array = np.ndarray


def laplacian(rows: int, cols: int) -> sparse.csr_array:
    def line(size: int) -> sparse.csr_array:
        return sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(size, size), dtype=np.float64)

    eye = [sparse.eye_array(size) for size in (rows, cols)]
    return sparse.csr_array(sparse.kron(eye[0], line(cols)) + sparse.kron(line(rows), eye[1]))


def spd(size: int, seed: int, condition: float = 100.0) -> Array:
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.normal(size=(size, size)))
    return (basis * np.geomspace(1, condition, size)) @ basis.T


def test_a_sor_step_is_the_textbook_sweep() -> None:
    random = np.random.default_rng(0)
    matrix = random.normal(size=(7, 7)) + 9 * np.eye(7)
    right, x = random.normal(size=7), random.normal(size=7)
    result = solve_sor(matrix, right, 1.3, x, max_iterations=1, rtol=0)
    for i in range(7):
        x[i] += 1.3 * (right[i] - matrix[i] @ x) / matrix[i, i]
    np.testing.assert_allclose(result.x, x, rtol=1e-13)
    assert result.nit == 1
    assert result.num_matvecs == 2


@pytest.mark.parametrize("omega", [0.7, 1.0, 1.6])
def test_the_sweep_solves_with_the_triangle(omega: float) -> None:
    matrix = sparse.csr_array(laplacian(7, 5) + sparse.diags_array(np.linspace(0.1, 30, 35)))
    triangle = np.tril(matrix.toarray(), -1) + np.diag(matrix.diagonal() / omega)
    right = np.random.default_rng(1).normal(size=35)
    sweep = LowerSweep(matrix, omega)
    np.testing.assert_allclose(sweep.solve(right), np.linalg.solve(triangle, right), rtol=1e-12)
    np.testing.assert_allclose(sweep.solve_transposed(right), np.linalg.solve(triangle.T, right), rtol=1e-12)


@pytest.mark.parametrize("solve", [solve_sor, solve_ssor_pcg])
def test_solutions_match_dense_algebra(solve: object) -> None:
    matrix = spd(20, 2)
    right, start = np.random.default_rng(3).normal(size=(2, 20)) + 5
    result = solve(matrix, right, 1.2, start, rtol=1e-11, max_iterations=50_000)  # type: ignore[operator]
    assert result.success
    np.testing.assert_allclose(result.x, np.linalg.solve(matrix, right), rtol=1e-7)
    assert result.residual_norm <= 1e-11 * np.linalg.norm(right - matrix @ start)


def test_pcg_counts_as_scipy_with_the_same_preconditioner() -> None:
    matrix, omega = laplacian(14, 11), 1.5
    right = np.random.default_rng(4).normal(size=matrix.shape[0])
    lower = np.tril(matrix.toarray(), -1) + np.diag(matrix.diagonal() / omega)
    middle = omega / (2 - omega) * lower @ np.diag(1 / matrix.diagonal()) @ lower.T
    inverse = np.linalg.inv(middle)
    steps: list[Array] = []
    expected, _ = sparse_linalg.cg(matrix, right, rtol=1e-8, M=inverse, callback=lambda x: steps.append(x.copy()))
    result = solve_ssor_pcg(matrix, right, omega, keep_history=True)
    assert result.nit == len(steps)
    np.testing.assert_allclose(result.x, expected, rtol=1e-9)
    assert result.num_matvecs == result.nit + 1
    assert result.history["residual"][-1] <= 1e-8 * result.history["residual"][0]


def test_optimal_omega_minimises_the_spectral_radius() -> None:
    matrix = laplacian(6, 6).toarray()
    best = optimal_omega(math.cos(math.pi / 7))

    def radius(omega: float) -> float:
        triangle = np.tril(matrix, -1) + np.diag(np.diag(matrix) / omega)
        return float(np.abs(np.linalg.eigvals(np.eye(36) - np.linalg.solve(triangle, matrix))).max())

    assert radius(best) == pytest.approx(best - 1, abs=1e-3)  # a defective eigenvalue: half the digits
    assert radius(best) < min(radius(best - 0.1), radius(best + 0.1))
    with pytest.raises(UserError, match=r"spectral radius in \[0, 1\)"):
        optimal_omega(1.0)


def test_what_comes_back_is_what_came_in() -> None:
    matrix, right = laplacian(4, 3), np.arange(12.0) + 1
    expected = np.linalg.solve(matrix.toarray(), right)
    coo = sparse.coo_array(matrix)
    indices = torch.tensor(np.stack(coo.coords).astype(np.int64))
    torch_sparse = torch.sparse_coo_tensor(indices, torch.tensor(coo.data), matrix.shape, check_invariants=True)
    for given_matrix in (matrix, matrix.toarray(), torch_sparse, torch.tensor(matrix.toarray())):
        x, info = sor(given_matrix, torch.tensor(right), omega=1.3)
        assert isinstance(x, torch.Tensor)
        assert info == 0
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)
        x, info = ssor_pcg(given_matrix, right[:, None], omega=1.3)
        assert info == 0
        assert x.shape == (12, 1)
        np.testing.assert_allclose(x[:, 0], expected, rtol=1e-6)


def test_how_runs_end() -> None:
    matrix, right = laplacian(10, 10), np.ones(100)
    assert sor(matrix, right, maxiter=5)[1] == 5
    indefinite = sparse.csr_array(matrix - 2 * sparse.eye_array(100))
    diverged = solve_sor(indefinite, right, 1.5, max_iterations=100_000)
    assert diverged.status is Status.DIVERGED
    assert diverged.info == -1
    assert np.isfinite(diverged.x).all()
    broken = solve_ssor_pcg(indefinite, right + np.arange(100), 1.0)
    assert broken.status is Status.BREAKDOWN
    assert "positive definite" in broken.message
    assert np.isfinite(broken.x).all()
    solved = solve_ssor_pcg(matrix, np.zeros(100))
    assert solved.success
    assert solved.nit == 0
    stopped = solve_sor(matrix, right, callback=lambda moment: moment.nit == 3)
    assert (stopped.status, stopped.nit) == (Status.STOPPED, 3)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), cols=st.integers(1, 9), omega=st.floats(0.3, 1.9), shift=st.floats(0.0, 50.0))
def test_residual_promised_is_the_residual_found(rows: int, cols: int, omega: float, shift: float) -> None:
    matrix = sparse.csr_array(laplacian(rows, cols) + shift * sparse.eye_array(rows * cols))
    right = np.random.default_rng(rows).normal(size=rows * cols) + 1
    for solve in (solve_sor, solve_ssor_pcg):
        result = solve(matrix, right, omega, rtol=1e-6)
        assert result.success
        assert np.linalg.norm(right - matrix @ result.x) <= 1.01e-6 * np.linalg.norm(right)


EYE = np.eye(3)


@pytest.mark.parametrize(
    ("matrix", "right", "omega", "start", "message"),
    [
        (np.ones((2, 3)), np.ones(2), 1.0, None, "square A"),
        (EYE, np.ones(4), 1.0, None, "square A"),
        (EYE, np.ones(3), 1.0, np.ones(2), r"x0 of shape \(3,\)"),
        (EYE, np.array([1, np.nan, 1]), 1.0, None, "finite numbers"),
        (np.diag([1.0, 0.0, 1.0]), np.ones(3), 1.0, None, r"A\[1, 1\] = 0"),
        (EYE, np.ones(3), 2.0, None, r"omega in \(0, 2\)"),
        (EYE, np.ones(3), float("nan"), None, r"omega in \(0, 2\)"),
        (1j * EYE, np.ones(3), 1.0, None, "real matrix"),
        (sparse_linalg.aslinearoperator(EYE), np.ones(3), 1.0, None, "got an operator"),
    ],
)
def test_bad_systems_are_named(matrix: Array, right: Array, omega: float, start: Array | None, message: str) -> None:
    for solve in (solve_sor, solve_ssor_pcg):
        with pytest.raises(UserError, match=message):
            solve(matrix, right, omega, start)


def test_pcg_needs_a_symmetric_matrix() -> None:
    with pytest.raises(UserError, match="symmetric A is needed"):
        solve_ssor_pcg(np.array([[2.0, 1.0], [0.0, 2.0]]), np.ones(2))
    with pytest.raises(UserError, match="positive diagonal"):
        solve_ssor_pcg(-EYE, np.ones(3))


@settings(max_examples=50, deadline=None)
@given(losses=st.lists(st.floats(0, 1e4), min_size=1, max_size=25), rounds=st.integers(1, 10_000))
def test_tsallis_weights_solve_their_equation(losses: list[float], rounds: int) -> None:
    values, rate = np.array(losses), 2 / math.sqrt(rounds)
    weights = tsallis_weights(values, rate)
    assert weights.sum() == pytest.approx(1)
    if len(losses) > 1:
        low = values.min()
        x = brentq(
            lambda x: (4 / (rate * (values - x)) ** 2).sum() - 1, low - 2 * 25 / rate, low - 1e-9 / rate, xtol=1e-13
        )
        np.testing.assert_allclose(weights, 4 / (rate * (values - x)) ** 2, rtol=1e-5)


def test_box_least_squares_matches_scipy() -> None:
    random = np.random.default_rng(5)
    for seed in range(10):
        features, target = random.normal(size=(30, 4)) * [1, 3, 0.3, 1], random.normal(size=30) + seed
        box = np.array([0.5, 0.1, 2.0, 0.05])
        expected = lsq_linear(features, target, (-box, box), method="bvls", tol=1e-14).x
        found = box_least_squares(features.T @ features, features.T @ target, box, np.zeros(4))
        np.testing.assert_allclose(found, expected, atol=1e-6)


def contexts(num: int, seed: int) -> Array:
    return np.asarray(-0.15 + 0.6 * np.random.default_rng(seed).beta(0.5, 1.5, size=num))


TABLE = np.linspace(-0.15, 0.45, 41)


@functools.cache
def iterations() -> Array:
    """SOR's iterations on the 10 × 10 grid for each shift of `TABLE` (rows) and each ω of the grid (columns)."""
    random, grid = np.random.default_rng(6), laplacian(10, 10)
    counts = np.zeros((TABLE.size, len(OMEGAS)))
    for row, shift in enumerate(TABLE):
        right = random.normal(size=100)
        for column, omega in enumerate(OMEGAS):
            counts[row, column] = solve_sor(grid + shift * sparse.eye_array(100), right, omega).nit
    return counts


def play(tuner: Tuner, num_rounds: int, seed: int = 0) -> Array:
    """The costs of a stream, read from the table: what `solve_stream` does, without solving each system anew."""
    costs = []
    for context in contexts(num_rounds, seed):
        omega = tuner.suggest(context)
        row = int(np.abs(TABLE - context).argmin())
        costs.append(iterations()[row, int(np.abs(np.array(OMEGAS) - omega).argmin())])
        tuner.observe(costs[-1])
    return np.array(costs)


def fixed_and_best(num_rounds: int, seed: int = 0) -> tuple[Array, float]:
    """Mean cost of each fixed ω, and of the best ω for each system, over the same stream."""
    rows = [int(np.abs(TABLE - context).argmin()) for context in contexts(num_rounds, seed)]
    return iterations()[rows].mean(0), float(iterations()[rows].min(1).mean())


@pytest.mark.slow  # test_solver_steps_linear.py holds each of its steps against a plain loop
def test_tsallis_inf_finds_the_best_fixed_value() -> None:
    fixed, _ = fixed_and_best(2000)
    costs = play(TsallisINF(seed=0), 2000)
    assert costs[-500:].mean() < 1.25 * fixed.min()
    assert costs[-500:].mean() < costs[:500].mean()
    assert fixed.min() < 0.3 * fixed[0]


@pytest.mark.slow  # thousands of rounds
def test_a_context_brings_less_than_the_best_fixed_value() -> None:
    fixed, best = fixed_and_best(2000)
    binned = play(TsallisINFCB(-0.15, 0.45, seed=0), 2000)
    assert binned[-500:].mean() <= fixed.min()
    smooth = play(ChebCB(-0.15, 0.65, seed=0), 1500)
    assert best <= smooth[-300:].mean() <= 0.75 * fixed.min()
    assert smooth[-300:].mean() < smooth[:300].mean()


def test_the_stream_of_solves_is_the_table() -> None:
    random, matrix = np.random.default_rng(7), laplacian(10, 10)
    shifts = contexts(30, 8)
    systems = [(matrix + c * sparse.eye_array(100), random.normal(size=100), c) for c in shifts]
    seen: list[int] = []
    stream = solve_stream(systems, ChebCB(-0.15, 0.65, seed=1), on_result=lambda result: seen.append(result.nit))
    assert stream.costs == seen
    assert stream.num_failed == 0
    assert stream.mean_cost() == np.mean(seen)
    assert stream.mean_cost(5) == np.mean(seen[-5:])
    again = solve_stream(systems, ChebCB(-0.15, 0.65, seed=1))
    assert again == stream
    faster = solve_stream(systems, TsallisINF(seed=1), solve=solve_ssor_pcg)
    assert faster.mean_cost() < 0.5 * stream.mean_cost()
    failing = solve_stream(systems[:3], TsallisINF(seed=1), max_iterations=4)
    assert failing.num_failed == 3
    assert failing.costs == [4, 4, 4]


@pytest.mark.slow
def test_the_whole_stream_with_a_solve_each_round() -> None:
    random, matrix = np.random.default_rng(0), laplacian(10, 10)
    systems = [(matrix + c * sparse.eye_array(100), random.normal(size=100), c) for c in contexts(1500, 0)]
    best_fixed = min(
        np.mean([solve_sor(matrix, right, omega).nit for matrix, right, _ in systems[-300:]])
        for omega in (1.7, 1.75, 1.8, 1.85)
    )
    assert solve_stream(systems, ChebCB(-0.15, 0.65, seed=0)).mean_cost(300) <= 0.75 * best_fixed


def test_cheb_cb_predicts_costs_that_are_polynomials() -> None:
    tuner = ChebCB(-1, 1, grid=[1.0, 1.5, 1.9], seed=2, growth=0)
    for context in np.random.default_rng(3).uniform(-1, 1, 400):
        omega = tuner.suggest(context)
        tuner.observe(20 + 10 * (omega - 1) * context + 3 * context**2)
    np.testing.assert_allclose(tuner.predict(0.5), [20.75, 23.25, 25.25], atol=0.1)
    assert [int(tuner.predict(context).argmin()) for context in (-0.9, 0.9)] == [2, 0]
    assert tuner.predict(7.0).tolist() == tuner.predict(1.0).tolist()


def test_bins_take_contexts_beyond_the_ends() -> None:
    tuner = TsallisINFCB(0.0, 1.0, num_bins=3, grid=[1.0, 1.5])
    for context in (-4.0, 0.5, 9.0):
        tuner.suggest(context)
        tuner.observe(5)
    assert [learner.num_rounds for learner in tuner.learners] == [1, 1, 1]


def test_costs_at_the_floor_are_no_trouble() -> None:
    for tuner in (TsallisINF(seed=0), ChebCB(0, 1, seed=0), TsallisINFCB(0, 1, seed=0)):
        for _ in range(20):
            tuner.suggest(0.5)
            tuner.observe(1)
            assert tuner.probabilities.sum() == pytest.approx(1)


def test_bad_use_of_tuners_is_named() -> None:
    tuner = TsallisINF(seed=0)
    with pytest.raises(UserError, match="suggest\\(\\) is needed before"):
        tuner.observe(3)
    tuner.suggest()
    for cost in (0.5, float("nan"), float("inf")):
        with pytest.raises(UserError, match="finite cost ≥ 1"):
            tuner.observe(cost)
    tuner.observe(1)
    assert tuner.num_rounds == 1
    for make in (ChebCB, TsallisINFCB):
        with pytest.raises(UserError, match="low < high"):
            make(1.0, 1.0)
        with pytest.raises(UserError, match="finite context"):
            make(0.0, 1.0).suggest()
    with pytest.raises(UserError, match="at least one bin"):
        TsallisINFCB(0, 1, num_bins=0)
    with pytest.raises(UserError, match="num_features ≥ 1"):
        ChebCB(0, 1, num_features=0)
    with pytest.raises(UserError, match="at least one finite value"):
        TsallisINF(grid=[])


def test_the_example_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "figure.html"
    monkeypatch.setattr(sys, "argv", ["relaxation.py", "--out", str(out), "--num-systems", "40"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "solvers" / "relaxation.py"), run_name="__main__")
    assert "plotly" in out.read_text(encoding="utf8").lower()
