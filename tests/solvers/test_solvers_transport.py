"""Entropic transport: plans against oracles, the Newton system against autograd, the rates the method is known for."""

from __future__ import annotations

import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from trainwright.artifacts import UserError
from trainwright.solvers.driver import Counts
from trainwright.solvers.outcome import Status
from trainwright.solvers.transport import SnsOptions, TransportResult, sinkhorn, solve_sinkhorn, solve_sns
from trainwright.solvers.transport import problem as problem_module
from trainwright.solvers.transport.problem import make_problem
from trainwright.solvers.transport.result import Potentials
from trainwright.solvers.transport.sns import _newton_matrix, _Sns


def uniform_cost(n: int, m: int, seed: int = 0) -> Tensor:
    return torch.rand(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(n: int, seed: int) -> Tensor:
    values = 0.2 + torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values / values.sum()


def kernel_sinkhorn(a: np.ndarray, b: np.ndarray, cost: np.ndarray, reg: float) -> np.ndarray:
    """The textbook iteration on exp(−C/reg), for reg large enough that it does not underflow."""
    kernel, u = np.exp(-cost / reg), np.ones_like(a)
    for _ in range(5000):
        v = b / (kernel.T @ u)
        u = a / (kernel @ v)
    return u[:, None] * kernel * v


@pytest.mark.parametrize("method", ["sns", "sinkhorn_log"])
def test_plan_equals_the_textbook_iteration(method: str) -> None:
    a, b, cost = weights(40, 1).numpy(), weights(25, 2).numpy(), 3 + uniform_cost(40, 25).numpy()
    plan = sinkhorn(a, b, cost, 0.05, method=method, stopThr=1e-13)
    np.testing.assert_allclose(plan, kernel_sinkhorn(a, b, cost, 0.05), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("solve", [solve_sns, solve_sinkhorn])
def test_points_without_weight_get_nothing_and_change_nothing(solve: Any) -> None:
    """The plan is that of the other points with zeros put in; potentials there are −∞."""
    a, b, cost = weights(9, 1), weights(7, 2), uniform_cost(9, 7, 3)
    a[[0, 4]], b[6] = 0.0, 0.0
    a, b = a / a.sum(), b / b.sum()
    rows, cols = a.nonzero().flatten(), b.nonzero().flatten()
    whole = solve(a, b, cost, 0.05, atol=1e-12)
    part = solve(a[rows], b[cols], cost[rows][:, cols], 0.05, atol=1e-12)
    wanted = torch.zeros(9, 7, dtype=torch.float64)
    wanted[rows[:, None], cols] = part.plan()
    torch.testing.assert_close(whole.plan(), wanted, rtol=1e-9, atol=0)
    assert torch.equal(whole.plan() == 0, wanted == 0)
    assert (whole.fun, whole.cost) == pytest.approx((part.fun, part.cost), rel=1e-9)
    assert (whole.nit, whole.success) == (part.nit, True)
    assert [bool(torch.isinf(potential).any()) for potential in whole.x] == [True, True]
    np.testing.assert_allclose(whole.plan().sum(1), a, atol=1e-12)
    plan, log = sinkhorn(a.numpy(), b.numpy(), cost.numpy(), 0.05, stopThr=1e-12, log=True)
    assert not plan[[0, 4]].any()
    assert not plan[:, 6].any()
    assert log["u"][0] == 0.0


def test_sums_near_one_are_divided_out_and_others_refused() -> None:
    a = weights(4, 1) * (1 + 5e-7)
    found = solve_sinkhorn(a, [], uniform_cost(4, 3), 0.1, atol=1e-10)
    assert float(found.plan().sum()) == pytest.approx(1.0, abs=1e-10)
    assert float(found.problem.a.sum()) == pytest.approx(1.0, abs=1e-15)
    with pytest.raises(UserError, match=r"a must sum to 1 .* divide it by its sum"):
        solve_sinkhorn(a * (1 + 1e-5), [], uniform_cost(4, 3), 0.1)


def test_small_reg_approaches_the_linear_programme() -> None:
    a, b, cost = weights(12, 3), weights(9, 4), uniform_cost(12, 9, 5)
    rows = np.kron(np.eye(12), np.ones((1, 9)))
    cols = np.kron(np.ones((1, 12)), np.eye(9))
    exact = linprog(cost.numpy().ravel(), A_eq=np.vstack([rows, cols]), b_eq=torch.cat([a, b]).numpy()).fun
    gaps = [solve_sns(a, b, cost, reg, atol=1e-11).cost - exact for reg in (1e-2, 2e-3)]
    assert 0 <= gaps[1] < gaps[0]
    assert gaps[1] < 2e-3 * np.log(12 * 9)


def test_objective_matches_its_definition() -> None:
    a, b, cost = weights(17, 6), weights(23, 7), uniform_cost(17, 23, 8)
    result = solve_sns(a, b, cost, 0.02, atol=1e-12)
    plan = result.plan()
    assert result.cost == pytest.approx(float((plan * cost).sum()), rel=1e-12)
    assert result.fun == pytest.approx(float((plan * cost + 0.02 * torch.special.xlogy(plan, plan)).sum()), rel=1e-12)
    error = (plan.sum(1) - a).abs().sum() + (plan.sum(0) - b).abs().sum()
    assert result.marginal_error == pytest.approx(float(error), abs=1e-14)


def dual(problem: problem_module.Problem, z: Tensor) -> Tensor:
    f, g = z[: problem.a.numel()], z[problem.a.numel() :]
    plan = ((f[:, None] + g - problem.cost) / problem.reg).exp()
    return problem.a @ f + problem.b @ g - problem.reg * plan.sum()


def test_gradient_and_newton_matrix_match_autograd() -> None:
    problem = make_problem(weights(6, 1), weights(4, 2), uniform_cost(6, 4), 0.3)
    method = _Sns(problem, SnsOptions(density=4))
    z = 0.1 * uniform_cost(1, 10, 3)[0]
    state = method._evaluated(z[:6], z[6:])
    expected = torch.func.grad(lambda z: dual(problem, z))(z)
    torch.testing.assert_close(method._gradient(state), expected, rtol=1e-12, atol=1e-14)
    matrix, scale = _newton_matrix(state, damping=0.0)
    hessian = torch.func.hessian(lambda z: dual(problem, z))(z)
    unscaled = matrix.toarray() / scale[:, None] / scale
    np.testing.assert_allclose(-unscaled / problem.reg, hessian.numpy(), rtol=1e-10, atol=1e-12)
    assert state.dual == pytest.approx(float(dual(problem, z)), rel=1e-13)


def test_damping_adds_to_the_scaled_diagonal() -> None:
    problem = make_problem([], [], uniform_cost(5, 7), 0.3)
    method = _Sns(problem, SnsOptions(density=2))
    state = method._evaluated(torch.zeros(5).double(), torch.zeros(7).double())
    matrix, _ = _newton_matrix(state, damping=0.25)
    np.testing.assert_allclose(matrix.diagonal(), 1.25)
    assert matrix.nnz == 12 + 2 * 14


@pytest.mark.parametrize("num_kept", [1, 7, 40, 119, 120])
@pytest.mark.parametrize("ties", [False, True])
def test_largest_entries_across_blocks(num_kept: int, ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "BLOCK", 30)
    cost = uniform_cost(12, 10, num_kept)
    cost = (4 * cost).round() / 4 if ties else cost
    problem = make_problem([], [], cost, 0.5)
    zero_f, zero_g = torch.zeros(12).double(), torch.zeros(10).double()
    kept = problem.evaluate(zero_f, zero_g, num_kept).kept
    plan = problem.plan(zero_f, zero_g)
    torch.testing.assert_close(kept.values.sort().values, plan.flatten().sort().values[-num_kept:])
    torch.testing.assert_close(plan[kept.rows, kept.cols], kept.values)
    assert len({(int(i), int(j)) for i, j in zip(kept.rows, kept.cols)}) == num_kept


def test_passes_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([], [], uniform_cost(33, 21), 0.01)
    f = uniform_cost(1, 33, 2)[0]
    g = uniform_cost(1, 21, 3)[0]
    whole = problem.row_lse(g), problem.col_lse(f), problem.plan(f, g), torch.tensor(problem.objective(f, g))
    monkeypatch.setattr(problem_module, "BLOCK", 50)
    parts = problem.row_lse(g), problem.col_lse(f), problem.plan(f, g), torch.tensor(problem.objective(f, g))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole[0], torch.logsumexp((g - problem.cost) / 0.01, 1))


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(2, 12), m=st.integers(2, 12), shift=st.floats(0, 50), factor=st.floats(0.1, 30), seed=st.integers(0, 99)
)  # fmt: skip
def test_plan_is_invariant_to_shift_and_units(n: int, m: int, shift: float, factor: float, seed: int) -> None:
    a, b, cost = weights(n, seed), weights(m, seed + 1), uniform_cost(n, m, seed)
    plan = sinkhorn(a, b, cost, 0.05, stopThr=1e-12, warn=False)
    moved = sinkhorn(a, b, factor * cost + shift, 0.05 * factor, stopThr=1e-12, warn=False)
    torch.testing.assert_close(moved, plan, rtol=1e-6, atol=1e-11)
    torch.testing.assert_close(sinkhorn(b, a, cost.T, 0.05, stopThr=1e-12, warn=False).T, plan, rtol=1e-6, atol=1e-11)


ETA = 1200


def newton_run(density: float, *, adaptive: bool, tol: float = 1e-11) -> TransportResult:
    options = SnsOptions(density=density, adaptive=adaptive)
    return solve_sns([], [], uniform_cost(300, 300, 1), 1 / ETA, atol=tol, max_iterations=45, options=options)


@pytest.mark.parametrize("adaptive", [False, True])
def test_few_newton_steps_reach_machine_precision(adaptive: bool) -> None:
    begin = time.process_time()
    result = newton_run(5, adaptive=adaptive)
    seconds = time.process_time() - begin
    assert result.success
    assert result.marginal_error < 1e-11
    assert result.num_sinkhorn == (8 if adaptive else 20)
    assert result.num_newton <= 15
    assert seconds < 20  # a guard against a stall alone; about 0.3 s on an idle core
    same_work = solve_sinkhorn([], [], uniform_cost(300, 300, 1), 1 / ETA, atol=1e-11, max_iterations=result.nfev)
    assert same_work.nfev >= 2 * result.nfev
    assert same_work.marginal_error > 1e-6


def test_too_few_entries_make_the_rate_linear_unless_they_grow() -> None:
    fixed, grown = newton_run(2, adaptive=False), newton_run(2, adaptive=True)
    assert fixed.status is Status.MAX_ITERATIONS
    assert 1e-11 < fixed.marginal_error < 1e-4
    assert grown.success
    assert grown.num_newton < 20


def test_cost_is_near_the_best_assignment() -> None:
    cost = uniform_cost(500, 500, 2)
    result = solve_sns([], [], cost, 1 / ETA, atol=1e-9)
    rows, cols = linear_sum_assignment(cost.numpy())
    best = float(cost[rows, cols].mean())
    assert best <= result.cost <= 1.10 * best


def image_problem(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two blurred spots and the L1 distance between pixels: a cost full of ties."""
    axis = torch.linspace(0, 1, size, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    one = (-30 * (points - torch.tensor([0.3, 0.4])).square().sum(1)).exp() + 0.01
    two = (-40 * (points - torch.tensor([0.6, 0.7])).square().sum(1)).exp() + 0.01
    return one / one.sum(), two / two.sum(), torch.cdist(points, points, p=1) / 2


def test_cost_full_of_ties_converges() -> None:
    a, b, cost = image_problem(12)
    result = solve_sns(a, b, cost, 1 / 300, atol=1e-11)
    assert result.success
    baseline = solve_sinkhorn(a, b, cost, 1 / 300, atol=1e-11, max_iterations=result.nfev // 2)
    assert baseline.marginal_error > 1e3 * result.marginal_error


def test_counts_are_passes_over_the_cost() -> None:
    counted = {"row_lse": 0, "col_lse": 0, "evaluate": 0}

    class Counting(problem_module.Problem):
        def __getattribute__(self, name: str) -> object:
            if name in counted:
                counted[name] += 1
            return super().__getattribute__(name)

    plain = make_problem([], [], uniform_cost(30, 20), 0.01)
    problem = Counting(plain.a, plain.b, plain.cost, plain.reg)
    method = _Sns(problem, SnsOptions(num_sinkhorn=3))
    from trainwright.solvers.transport.sinkhorn import start

    state = start(problem, method.counts)
    for _ in range(8):
        state = method.step(state)
    assert method.counts["nfev"] == sum(counted.values())
    assert method.counts["newton"] >= 1
    assert method.counts["sinkhorn"] >= 3


def test_float32_cost_and_tensors_come_back_in_float64_potentials() -> None:
    cost = uniform_cost(20, 30).float()
    result = solve_sns([], [], cost, 0.02, atol=1e-12)
    assert result.success
    assert result.x[0].dtype == torch.float64
    exact = solve_sns([], [], cost.double(), 0.02, atol=1e-12)
    torch.testing.assert_close(result.plan(), exact.plan(), rtol=1e-9, atol=1e-13)


def test_dialect_returns_what_it_was_given() -> None:
    cost = uniform_cost(8, 6)
    assert isinstance(sinkhorn([], [], cost, 0.1), Tensor)
    plan, log = sinkhorn([], [], cost.numpy(), 0.1, log=True)
    assert isinstance(plan, np.ndarray)
    np.testing.assert_allclose(log["u"][:, None] * np.exp(-cost.numpy() / 0.1) * log["v"], plan, rtol=1e-10)
    np.testing.assert_allclose(log["alpha"], 0.1 * log["log_u"])
    assert log["niter"] == len(log["err"]) - 1
    assert log["warning"] is None
    assert log["err"][-1] <= 1e-9


def test_dialect_warns_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="raise max_iterations.*num_sinkhorn"):
        sinkhorn([], [], uniform_cost(20, 20), 1e-3, numItermax=2, verbose=True)
    assert len(capsys.readouterr().out.splitlines()) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, log = sinkhorn([], [], uniform_cost(20, 20), 1e-3, numItermax=2, warn=False, log=True)
    assert "max_iterations" in log["warning"]


def test_callback_stops_and_the_best_iterate_comes_back() -> None:
    result = solve_sns([], [], uniform_cost(50, 50), 1e-3, callback=lambda moment: moment.nit == 5)
    assert result.status is Status.STOPPED
    assert result.num_sinkhorn == 5
    assert result.marginal_error < 1


def test_where_no_step_rises_sinkhorn_steps_are_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    method = _Sns(make_problem([], [], uniform_cost(10, 12), 0.05), SnsOptions(num_sinkhorn=0, rescue=2))
    monkeypatch.setattr(_Sns, "_rises", lambda *_: False)
    from trainwright.solvers.transport.sinkhorn import start

    state: Potentials = start(method.problem, Counts())
    for _ in range(2):
        state = method.step(state)
        assert state.stage == "sinkhorn"
    assert method.counts["sinkhorn"] == 2
    assert method.counts["newton"] == 1


GOOD = [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("a", "b", "cost", "reg", "message"),
    [
        ([0.5, 0.5], [0.5, 0.5], [1.0, 2.0], 0.1, r"shape \(n, m\)"),
        ([0.5, 0.5], [0.5, 0.5], GOOD, 0.0, "reg > 0"),
        ([0.5, 0.5], [0.5, 0.5], GOOD, float("nan"), "reg > 0"),
        ([0.5, 0.5], [0.5, 0.5], [[0.0, float("inf")], [1.0, 0.0]], 0.1, "finite cost"),
        ([0.5, 0.5], [0.5, 0.5], [[0.0, float("nan")], [1.0, 0.0]], 0.1, "finite cost"),
        ([0.5, 0.5], [0.5, 0.5], [[0.0, -1.0], [1.0, 0.0]], 0.1, "costs ≥ 0"),
        ([0.5, 0.25, 0.25], [0.5, 0.5], GOOD, 0.1, r"a of shape \(2,\)"),
        ([0.5, 0.5], [1.5, -0.5], GOOD, 0.1, "weights ≥ 0 are needed in b"),
        ([0.0, 0.0], [0.5, 0.5], GOOD, 0.1, "a must sum to 1"),
        ([0.5, 0.6], [0.5, 0.5], GOOD, 0.1, "a must sum to 1"),
        ([0.5, 0.5], [0.5, 0.5], [[0j, 1.0], [1.0, 0.0]], 0.1, "real numbers"),
    ],
)
def test_bad_input_is_named(a: list[float], b: list[float], cost: list[list[float]], reg: float, message: str) -> None:
    for solve in (solve_sns, solve_sinkhorn):
        with pytest.raises(UserError, match=message):
            solve(a, b, cost, reg)


def test_bad_options_are_named() -> None:
    with pytest.raises(UserError, match="num_sinkhorn ≥ 0"):
        SnsOptions(num_sinkhorn=-1)
    with pytest.raises(UserError, match="density > 0"):
        SnsOptions(density=0)
    with pytest.raises(UserError, match="'sns' or 'sinkhorn_log'"):
        sinkhorn([], [], GOOD, 0.1, method="greenkhorn")  # type: ignore[arg-type]


@pytest.mark.slow
def test_five_thousand_points_within_memory() -> None:
    result = solve_sns([], [], uniform_cost(5000, 5000, 1), 1 / ETA, atol=1e-9)
    assert result.success
    assert result.num_newton <= 5


def test_the_example_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "figure.html"
    monkeypatch.setattr(sys, "argv", ["transport.py", "--out", str(out), "--num-points", "60"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "solvers" / "transport.py"), run_name="__main__")
    assert "plotly" in out.read_text(encoding="utf8").lower()
