"""Sketched SQP: the merit against finite differences, the sketches against their steps one by one, known optima."""

from __future__ import annotations

import itertools
import runpy
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from trainwright.artifacts import UserError
from trainwright.solvers.constrained import (
    NumpyProblem,
    SqpOptions,
    TorchProblem,
    minimize,
    solve_adasketch_newton,
    solve_ai_sqp,
)
from trainwright.solvers.constrained.ai_sqp import Point
from trainwright.solvers.constrained.problem import SlackProblem
from trainwright.solvers.constrained.sketch import SketchedSystem
from trainwright.solvers.outcome import Status

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.solvers.constrained_problems import PROBLEMS, Problem, sine_quartic

Array = np.ndarray
BY_NAME = {problem.name: problem for problem in PROBLEMS}
EXACT = SqpOptions(sketch="exact")


def point_of(problem: Problem, x: Array, multipliers: Array) -> Point:
    inner = TorchProblem(problem.fun, problem.constraints)
    return Point(x, multipliers, inner.values(x), inner, eta1=1.3, eta2=0.2, delta=0.1)


def merit_difference(point: Point) -> Array:
    """Central differences of the merit in (x, λ)."""
    size, steps = point.x.size + point.multipliers.size, []
    for i in range(size):
        ahead, behind = (point.moved(np.eye(size)[i], sign * 1e-6).merit() for sign in (1, -1))
        steps.append((ahead - behind) / 2e-6)
    return np.array(steps)


@pytest.mark.parametrize("name", ["HS7", "HS40", "HS77", "HS79"])
def test_merit_gradient_matches_differences(name: str) -> None:
    problem = BY_NAME[name]
    random = np.random.default_rng(0)
    x = np.array(problem.x0) + 0.1 * random.normal(size=len(problem.x0))
    num = problem.constraints(torch.from_numpy(x)).numel()
    point = point_of(problem, x, random.normal(size=num) + 1)
    exact, difference = point.merit_gradient(), merit_difference(point)
    assert np.linalg.norm(exact - difference) < 1e-6 * np.linalg.norm(difference)


def test_the_hessian_of_f_alone_is_not_the_merits() -> None:
    """What the authors' code has in place of ∇²L; a gradient check sees it, a run's end does not."""
    problem = BY_NAME["HS77"]
    point = point_of(problem, np.array(problem.x0) + 0.1, np.array([0.7, -1.2]))
    difference = merit_difference(point)
    curvature = point.problem.hessian(point.x, np.zeros(2))
    wrong = point.merit_gradient()
    wrong[:5] += point.eta2 * (curvature - point.hessian) @ point.gradient
    assert np.linalg.norm(wrong - difference) > 1e-4 * np.linalg.norm(difference)


def kkt_matrix(seed: int, num_variables: int = 9, num_constraints: int = 4) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    block = random.normal(size=(num_variables, num_variables))
    jacobian = random.normal(size=(num_constraints, num_variables))
    top = np.hstack([block @ block.T + np.eye(num_variables), jacobian.T])
    matrix = np.vstack([top, np.hstack([jacobian, np.zeros((num_constraints, num_constraints))])])
    return matrix, random.normal(size=num_variables + num_constraints) + 3


@pytest.mark.parametrize("sketch", ["kaczmarz", "gaussian"])
def test_a_chunk_is_its_steps_one_by_one(sketch: Any) -> None:
    matrix, right = kkt_matrix(1)
    system = SketchedSystem(matrix, right, sketch, 1, np.random.default_rng(2))
    draws, z = np.random.default_rng(2), np.zeros_like(right)
    for _ in range(3):
        system._chunk()
        if sketch == "kaczmarz":
            actions = np.eye(right.size)[draws.choice(np.arange(right.size), 64, replace=True)]
        else:
            actions = draws.standard_normal((64, right.size))
        for action in actions:
            row = matrix.T @ action
            z = z - action @ (matrix @ z - right) / (row @ row) * row
    np.testing.assert_allclose(system.z, z, rtol=1e-8)
    np.testing.assert_allclose(system.residual, matrix @ z - right, atol=1e-8)
    assert system.num_steps == 192


@pytest.mark.parametrize("sketch", ["kaczmarz", "gaussian"])
@pytest.mark.parametrize("size", [1, 5, 20])
def test_sketches_solve_the_system(sketch: Any, size: int) -> None:
    matrix, right = kkt_matrix(5)
    system = SketchedSystem(matrix, right, sketch, size, np.random.default_rng(4))
    assert system.advance(1e-9, 1_000_000)
    np.testing.assert_allclose(system.z, np.linalg.solve(matrix, right), rtol=1e-6)


def test_larger_blocks_need_fewer_rows_in_all() -> None:
    matrix, right = kkt_matrix(5)
    spent = []
    for size in (1, 10):
        system = SketchedSystem(matrix, right, "kaczmarz", size, np.random.default_rng(6))
        assert system.advance(1e-8, 1_000_000)
        spent.append(system.num_steps)
    assert spent[1] < 0.5 * spent[0]


def test_a_sketch_stops_at_its_limit_and_at_rounding() -> None:
    matrix, right = kkt_matrix(7)
    system = SketchedSystem(matrix, right, "kaczmarz", 1, np.random.default_rng(8))
    assert not system.advance(1e-9, 128)
    assert system.num_steps == 128
    assert system.advance(0.0, 10_000_000)
    assert np.linalg.norm(matrix @ system.z - right) < 1e-11


@pytest.mark.parametrize("sketch", ["kaczmarz", "gaussian"])
def test_steps_are_whole_and_the_residual_falls_quadratically(sketch: Any) -> None:
    problem = sine_quartic()
    result = solve_ai_sqp(
        problem.fun, problem.x0, problem.constraints, options=SqpOptions(sketch=sketch), keep_history=True, atol=1e-9
    )
    assert result.success
    residuals = result.history["residual"]
    assert result.nit <= 10
    assert set(result.history["step_size"][1:]) == {1.0}
    assert residuals[-1] < 20 * residuals[-2] ** 2 + 1e-12
    exact = solve_ai_sqp(problem.fun, problem.x0, problem.constraints, options=EXACT, atol=1e-9)
    np.testing.assert_allclose(result.x, exact.x, atol=1e-8)
    assert result.nit == exact.nit
    assert result.num_sketches > 0
    assert exact.num_sketches == 0


QUICK = [
    "HS6",
    "HS7",
    "HS28",
    "HS39",
    "HS40",
    "HS42",
    "HS48",
    "HS50",
    "HS51",
    "HS52",
    "HS77",
    "HS78",
    "HS79",
    pytest.param("BYRDSPHR", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", QUICK)
def test_known_optima(name: str) -> None:
    problem = BY_NAME[name]
    result = solve_ai_sqp(problem.fun, problem.x0, problem.constraints, atol=1e-7, seed=0)
    assert result.success
    assert result.fun == pytest.approx(problem.best, abs=2e-6)
    assert result.constr_violation < 1e-7


@pytest.mark.parametrize("name", ["HS26", "HS27", "HS46", "HS47", "HS49", "BT1"])
def test_degenerate_optima_with_exact_systems(name: str) -> None:
    problem = BY_NAME[name]
    result = solve_ai_sqp(problem.fun, problem.x0, problem.constraints, atol=1e-7, options=EXACT)
    assert result.success
    assert result.fun == pytest.approx(problem.best, abs=2e-6)


def test_solution_meets_the_kkt_conditions() -> None:
    problem = BY_NAME["HS77"]
    result = solve_ai_sqp(problem.fun, torch.tensor(problem.x0), problem.constraints, atol=1e-9)
    assert isinstance(result.x, Tensor)
    gradient = torch.func.grad(problem.fun)(result.x)
    jacobian = torch.func.jacrev(problem.constraints)(result.x)
    torch.testing.assert_close(gradient + jacobian.T @ result.multipliers, torch.zeros(5).double(), atol=1e-8, rtol=0)
    torch.testing.assert_close(result.jac, gradient)
    assert result.nhev == result.nit
    assert result.nfev >= result.nit + 1


def root_problem() -> Problem:
    """Σ √(1 + (x − 1)²) with x₀ + 2x₁ = 7: full Newton steps overshoot more and more from far away."""
    return Problem(
        "roots",
        lambda x: torch.sqrt(1 + (x - 1) ** 2).sum(),
        lambda x: (x[0] + 2 * x[1] - 7).reshape(1),
        [31.0, -12.0],
        float("nan"),
    )


def test_line_search_converges_where_full_newton_steps_do_not() -> None:
    problem = root_problem()
    point = point_of(problem, np.array(problem.x0), np.zeros(1))
    first = np.linalg.norm(point.kkt)
    for _ in range(8):
        jacobian = point.values.jacobian
        matrix = np.block([[point.hessian, jacobian.T], [jacobian, np.zeros((1, 1))]])
        if not np.isfinite(matrix).all() or np.linalg.cond(matrix) > 1e14:
            break
        point = point.moved(np.linalg.solve(matrix, -point.kkt), 1.0)
    assert np.abs(point.x).max() > 1e3
    result = solve_ai_sqp(problem.fun, problem.x0, problem.constraints, options=EXACT)
    assert result.success
    expected = optimize.minimize_scalar(lambda y: np.sqrt(1 + (6 - 2 * y) ** 2) + np.sqrt(1 + (y - 1) ** 2))
    assert result.x[1] == pytest.approx(expected.x, abs=1e-6)
    assert first > 0


def test_negative_curvature_is_shifted_and_the_merit_falls() -> None:
    merits: list[float] = []

    def watch(moment: Any) -> None:
        merits.append(replace(moment.state, eta1=1.0, eta2=0.1).merit())

    result = solve_ai_sqp(
        lambda x: torch.cos(2 * x).sum() + 0.05 * x.square().sum(),
        [0.3, -0.2, 0.1],
        lambda x: x.sum().reshape(1) - 1,
        options=EXACT,
        callback=watch,
    )
    assert result.success
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(merits))
    inner = TorchProblem(lambda x: torch.cos(2 * x).sum() + 0.05 * x.square().sum(), lambda x: x.sum().reshape(1) - 1)
    assert np.linalg.eigvalsh(inner.hessian(np.array([0.3, -0.2, 0.1]), np.zeros(1)))[0] < 0
    assert np.linalg.eigvalsh(inner.hessian(result.x, result.multipliers))[1] > 0


@settings(max_examples=10, deadline=None)
@given(n=st.integers(2, 7), m=st.integers(1, 3), seed=st.integers(0, 999))
def test_quadratic_programmes_take_one_step(n: int, m: int, seed: int) -> None:
    m = min(m, n - 1)
    random = np.random.default_rng(seed)
    root, matrix = random.normal(size=(n, n)), random.normal(size=(m, n))
    hessian, linear, right = root @ root.T + np.eye(n), random.normal(size=n), random.normal(size=m)
    if np.linalg.svd(matrix)[1][-1] < 0.1:
        return
    problem = NumpyProblem(
        lambda x: 0.5 * x @ hessian @ x + linear @ x, lambda x: hessian @ x + linear, lambda x: matrix @ x - right,
        lambda x: matrix, lambda x, v: hessian,
    )  # fmt: skip
    result = solve_ai_sqp(problem, random.normal(size=n), options=EXACT, atol=1e-9)
    system = np.block([[hessian, matrix.T], [matrix, np.zeros((m, m))]])
    expected = np.linalg.solve(system, np.concatenate([-linear, right]))
    assert result.nit == 1
    np.testing.assert_allclose(result.x, expected[:n], atol=1e-7)
    np.testing.assert_allclose(result.multipliers, expected[n:], atol=1e-6)


def test_inexact_steps_spend_fewer_sketches() -> None:
    problem = sine_quartic()
    spent = [
        solve_ai_sqp(problem.fun, problem.x0, problem.constraints, options=options, atol=1e-6)
        for options in (SqpOptions(sketch="kaczmarz", psi_scale=scale) for scale in (1.0, 1e-5))
    ]
    assert all(result.success for result in spent)
    assert spent[1].num_sketches / spent[1].nit < 0.7 * spent[0].num_sketches / spent[0].nit


def test_a_forced_tolerance_ends_superlinearly() -> None:
    """With θ falling with the residual, each step gains more than the last, also where the steps are inexact."""
    problem = sine_quartic()
    factors = {}
    for forcing in (0.0, 1.0):
        options = SqpOptions(sketch="kaczmarz", psi_scale=1e-8, forcing=forcing)
        result = solve_ai_sqp(
            problem.fun, problem.x0, problem.constraints, options=options, atol=1e-9, keep_history=True
        )
        assert result.success
        residuals = result.history["residual"]
        factors[forcing] = [after / before for before, after in pairwise(residuals)]
    assert len(factors[1.0]) < 0.7 * len(factors[0.0])
    assert factors[1.0][-1] < 0.1 * factors[0.0][-1]


def test_steps_are_exact_unless_sketches_are_asked_for() -> None:
    problem = sine_quartic()
    result = solve_ai_sqp(problem.fun, problem.x0, problem.constraints)
    assert (result.success, result.num_sketches) == (True, 0)
    constraint = {"type": "eq", "fun": problem.constraints}
    dialect = minimize(problem.fun, torch.tensor(problem.x0), constraints=constraint)
    assert (dialect.success, dialect.num_sketches) == (True, 0)


def rosenbrock_like(x: Any) -> Any:
    return (x[0] - 2) ** 2 + 3 * (x[1] - x[0] ** 2) ** 2 + (x[2] + 1) ** 4


def rosenbrock_gradient(x: Array) -> Array:
    inner = x[1] - x[0] ** 2
    return np.array([2 * (x[0] - 2) - 12 * x[0] * inner, 6 * inner, 4 * (x[2] + 1) ** 3])


def rosenbrock_hessian(x: Array) -> Array:
    hessian = np.diag([2 - 12 * (x[1] - 3 * x[0] ** 2), 6.0, 12 * (x[2] + 1) ** 2])
    hessian[0, 1] = hessian[1, 0] = -12 * x[0]
    return hessian


def test_minimize_agrees_with_scipy_and_between_numpy_and_torch() -> None:
    circle = {
        "type": "eq",
        "fun": lambda x, r: x[0] ** 2 + x[1] ** 2 + x[2] ** 2 - r,
        "jac": lambda x, r: 2 * x,
        "args": (4.0,),
    }
    plane = optimize.LinearConstraint([[1.0, 0.0, -1.0]], 0.5, 0.5)
    start = np.array([1.0, 1.0, 0.6])
    expected = optimize.minimize(
        rosenbrock_like, start, jac=rosenbrock_gradient, method="SLSQP", constraints=[circle, plane], tol=1e-12
    )
    arguments: dict[str, Any] = {"constraints": [circle, plane], "options": {"sketch": "exact"}}
    for result in (
        minimize(rosenbrock_like, start, jac=rosenbrock_gradient, **arguments),
        minimize(rosenbrock_like, torch.tensor(start), **arguments),
    ):
        assert result.success
        np.testing.assert_allclose(np.asarray(result.x), expected.x, atol=1e-5)
        assert result.fun == pytest.approx(expected.fun, abs=1e-8)


def test_minimize_with_inequalities_and_bounds() -> None:
    lower = {"type": "ineq", "fun": lambda x: x[0] + x[1] - 1.5}
    ball = optimize.NonlinearConstraint(lambda x: x @ x, -np.inf, 3.0)
    result = minimize(
        lambda x: ((x - torch.tensor([2.0, 2.0, 2.0])) ** 2).sum(),
        torch.tensor([0.5, 0.4, 0.3]),
        constraints=[lower, ball],
        bounds=[(None, 0.8), (None, None), (0.0, 5.0)],
        options={"sketch": "exact"},
    )
    assert result.success
    rest = np.sqrt((3 - 0.8**2) / 2)
    np.testing.assert_allclose(result.x.numpy(), [0.8, rest, rest], atol=1e-5)


def test_derivatives_with_slacks_are_those_of_the_values() -> None:
    """x and s of c(x) − s²: the columns of the Jacobian, and the Hessian of the Lagrangian, by central differences."""
    inner = NumpyProblem(
        rosenbrock_like,
        rosenbrock_gradient,
        lambda x: np.array([x @ x - 1, x[0] * x[1], x[2] + 0.5]),
        lambda x: np.array([2 * x, [x[1], x[0], 0.0], [0.0, 0.0, 1.0]]),
    )
    problem = SlackProblem(inner, np.array([True, False, True]), 3)
    at, multipliers, step = np.array([0.3, -0.4, 0.7, 0.9, -0.6]), np.array([0.5, -1.5, 2.0]), 1e-5

    def slopes(point: Array) -> Array:
        here = problem.values(point)
        return here.gradient + here.jacobian.T @ multipliers

    moves = step * np.eye(5)
    by_differences = [
        (problem.values(at + m).constraints - problem.values(at - m).constraints) / 2 / step for m in moves
    ]
    np.testing.assert_allclose(problem.values(at).jacobian, np.array(by_differences).T, atol=1e-8)
    own = np.array([(slopes(at + m) - slopes(at - m)) / 2 / step for m in moves])
    np.testing.assert_allclose(problem.hessian(at, multipliers)[3:], own[3:], atol=1e-6)


def test_exact_hessians_of_constraints_are_used() -> None:
    matrix = np.array([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]])
    weights: list[Array] = []

    def hess(x: Array, v: Array) -> Array:
        weights.append(v)
        return np.diag([2 * v[1], 0.0, 0.0])

    constraint = optimize.NonlinearConstraint(
        lambda x: matrix @ x + np.array([0.0, x[0] ** 2]),
        [-np.inf, 0.5],
        [np.inf, 0.5],
        jac=lambda x: matrix + np.array([[0, 0, 0], [2 * x[0], 0, 0]]),
        hess=hess,
    )
    arguments: dict[str, Any] = {"jac": rosenbrock_gradient, "constraints": constraint, "options": {"sketch": "exact"}}
    exact = minimize(rosenbrock_like, [1.0, 1.0, 1.0], hess=rosenbrock_hessian, **arguments)
    assert exact.success
    assert weights
    assert all(v[0] == 0 for v in weights)
    differences = minimize(rosenbrock_like, [1.0, 1.0, 1.0], **arguments)
    np.testing.assert_allclose(exact.x, differences.x, atol=1e-6)
    assert differences.nfev > exact.nfev


def test_callback_and_limits_stop() -> None:
    seen: list[Array] = []
    problem = BY_NAME["HS79"]

    def stop(x: Array) -> bool:
        seen.append(x)
        return len(seen) == 3

    constraint = {"type": "eq", "fun": problem.constraints}
    result = minimize(problem.fun, torch.tensor(problem.x0), constraints=constraint, callback=stop)
    assert (result.status, result.nit) == (Status.STOPPED, 2)
    assert isinstance(seen[0], Tensor)
    short = minimize(problem.fun, torch.tensor(problem.x0), constraints=constraint, options={"maxiter": 1})
    assert short.status is Status.MAX_ITERATIONS


def test_capped_systems_are_counted_and_named() -> None:
    problem = BY_NAME["HS46"]
    options = SqpOptions(sketch="kaczmarz", max_sketches=200)
    result = solve_adasketch_newton(problem.fun, problem.x0, problem.constraints, options=options, max_iterations=5)
    assert not result.success
    assert result.num_capped > 0
    assert "sketch='exact'" in result.message


def test_dependent_constraints_and_values_that_are_not_finite() -> None:
    twice = solve_ai_sqp(
        lambda x: x.square().sum(), [1.0, 2.0, 3.0], lambda x: torch.stack([x.sum() - 1, 2 * x.sum() - 2])
    )
    assert twice.status is Status.BREAKDOWN
    assert "linearly dependent" in twice.message
    assert twice.x.tolist() == [1.0, 2.0, 3.0]
    start = solve_ai_sqp(lambda x: torch.log(-x).sum(), [1.0, 2.0], lambda x: x[:1] - 1)
    assert start.status is Status.NOT_FINITE
    inside = solve_ai_sqp(lambda x: x.sum() - 3 * torch.log(x).sum(), [0.1, 4.0], lambda x: x[:1] - x[1:] - 1)
    assert inside.success
    assert inside.x[0] == pytest.approx(inside.x[1] + 1, abs=1e-7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SqpOptions(forcing=-1.0), "forcing of at least 0"),
        (lambda: SqpOptions(sketch="rows"), "a sketch of"),  # type: ignore[arg-type]
        (lambda: SqpOptions(eta1=-1), "positive constants"),
        (lambda: SqpOptions(beta=0.5), "0 < beta < 0.5"),
        (lambda: solve_ai_sqp(torch.sum, [[1.0]]), "a vector of finite numbers"),
        (lambda: solve_ai_sqp(torch.sum, [float("nan")]), "a vector of finite numbers"),
        (lambda: solve_ai_sqp(lambda x: x, [1.0, 2.0]), "one number as a tensor"),
        (lambda: solve_ai_sqp(torch.sum, [1.0, 2.0], lambda x: 3), "constraints must return a tensor"),
        (lambda: solve_ai_sqp(torch.sum, [1.0], lambda x: torch.cat([x, x])), "as many constraints"),
        (lambda: solve_ai_sqp(torch.sum, [1.0, 2.0], lambda x: x[:1], multipliers=[1.0, 2.0]), r"multipliers of shape \(1,\)"),
        (lambda: minimize(np.sum, [1.0]), "derivatives are needed"),
        (lambda: minimize(np.sum, [1.0], jac=np.ones_like, constraints={"type": "le"}), "type 'eq' or 'ineq'"),
        (lambda: minimize(np.sum, [1.0], jac=np.ones_like, constraints=3), "LinearConstraint or NonlinearConstraint"),
        (lambda: minimize(np.sum, [1.0], jac=np.ones_like, bounds=[(2.0, 1.0)]), "infeasible"),
        (lambda: minimize(np.sum, [1.0], jac=np.ones_like, options={"ftol": 1}), "options of maxiter"),
        (lambda: minimize(np.sum, [1.0, 2.0], jac=lambda x: np.ones(3)), r"jac of shape \(2,\)"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_the_example_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "figure.html"
    monkeypatch.setattr(sys, "argv", ["constrained.py", "--out", str(out)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "solvers" / "constrained.py"), run_name="__main__")
    assert "plotly" in out.read_text(encoding="utf8").lower()
