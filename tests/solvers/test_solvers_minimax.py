"""Minimax methods against hand-written recursions, closed forms and the theory's rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.grids import slow_but
from trainwright.artifacts import UserError
from trainwright.solvers.minimax import GDA, SVRGGDA, AccSpiderGDA, SpiderGDA, minimax, theory
from trainwright.solvers.minimax.gda import Point
from trainwright.solvers.minimax.problem import Oracle
from trainwright.solvers.minimax.reduced import Anchored
from trainwright.solvers.outcome import Status
from trainwright.solvers.values import Packing


@dataclass
class Game:
    """fᵢ = ½ (pᵢ·u)² + (pᵢ·u)(rᵢ·v)-like terms of low rank, u = x − x*, v = y − y*: PL, not strongly convex."""

    p: Tensor
    q: Tensor
    r: Tensor
    s: Tensor
    saddle_x: Tensor
    saddle_y: Tensor

    def jac(self, x: Tensor, y: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        p, q, r, s, num = self.p[indices], self.q[indices], self.r[indices], self.s[indices], len(indices)
        u, v = x - self.saddle_x, y - self.saddle_y
        return (p.T @ (p @ u) + r.T @ (s @ v)) / num, (s.T @ (r @ u) - q.T @ (q @ v)) / num

    def fun(self, x: Tensor, y: Tensor, indices: Tensor) -> Tensor:
        u, v = x - self.saddle_x, y - self.saddle_y
        p, q, r, s = self.p[indices], self.q[indices], self.r[indices], self.s[indices]
        return (((p @ u) ** 2 - (q @ v) ** 2) / 2 + (r @ u) * (s @ v)).mean()


def game(num: int, dim_x: int, dim_y: int, rank: int, condition: float, coupling: float, seed: int = 0) -> Game:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def basis(dim: int) -> Tensor:
        rank_here = min(rank, dim)
        spectrum = torch.linspace(1 / condition, 1, rank_here, dtype=torch.float64).sqrt()
        return torch.linalg.qr(normal(dim, dim))[0][:, :rank_here] * spectrum

    basis_x, basis_y = basis(dim_x), basis(dim_y)
    p, q, r = normal(num, basis_x.shape[1]), normal(num, basis_y.shape[1]), normal(num, basis_x.shape[1])
    mixing = coupling**0.5 * torch.eye(basis_x.shape[1], basis_y.shape[1], dtype=torch.float64)
    r, s = coupling**0.5 * r @ basis_x.T, r @ mixing @ basis_y.T
    return Game(p @ basis_x.T, q @ basis_y.T, r, s, normal(dim_x), 3 + normal(dim_y))


def start(problem: Game, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = problem.saddle_x + torch.randn(len(problem.saddle_x), generator=generator, dtype=torch.float64)
    return x, problem.saddle_y + torch.randn(len(problem.saddle_y), generator=generator, dtype=torch.float64)


def oracle_of(problem: Game, x: Tensor, y: Tensor) -> Oracle:
    packings = Packing.of(x)[0], Packing.of(y)[0]
    return Oracle(problem.fun, problem.jac, len(problem.p), packings, max_batch=None, device=x.device)


@pytest.mark.parametrize("recursive", [True, False])
def test_steps_equal_the_recursion_written_out(recursive: bool) -> None:
    problem = game(12, 4, 3, 2, 5.0, 0.4)
    x, y = start(problem)
    method = (SpiderGDA if recursive else SVRGGDA)(0.05, 0.08, batch_size=3, period=4, num_inner=10, output_rule="last")
    result = minimax(None, x, y, 12, method=method, jac=problem.jac, max_iterations=9, seed=5)

    draw = torch.Generator().manual_seed(5)
    torch.randint(10, (), generator=draw)
    everything = torch.arange(12)
    for k in range(9):
        if k % 4 == 0:
            grad_x, grad_y = full = problem.jac(x, y, everything)
            anchor = x, y
        else:
            batch_x, batch_y = (torch.randint(12, (3,), generator=draw) for _ in range(2))
            grad_x = full[0] + problem.jac(x, y, batch_x)[0] - problem.jac(*anchor, batch_x)[0]
            grad_y = full[1] + problem.jac(x, y, batch_y)[1] - problem.jac(*anchor, batch_y)[1]
            if recursive:
                anchor, full = (x, y), (grad_x, grad_y)
        x, y = x - 0.05 * grad_x, y + 0.08 * grad_y
    torch.testing.assert_close((result.x, result.y), (x, y), rtol=1e-12, atol=1e-12)
    # four full gradients (k = 0, 4, 8 and at the end) and six steps of two gradients for each of three components
    assert (result.nsfo, result.nfev, result.nit) == (4 * 12 + 6 * 2 * 3, 84, 9)


@pytest.mark.slow
def test_error_of_the_recursive_estimate_grows_k_times_slower() -> None:
    """Along the same path, from the same full gradient: MSE(SVRG)/MSE(SPIDER) ~ k (1.0, 3.5, 16.8, 42 in theory's regime)."""
    problem = game(300, 10, 10, 10, 10.0, 0.3)
    path = [Point(*start(problem))]
    oracle = oracle_of(problem, *start(problem))
    for _ in range(44):
        grad_x, grad_y = oracle.full(path[-1].x, path[-1].y)
        path.append(Point(path[-1].x - 0.02 * grad_x, path[-1].y + 0.02 * grad_y))
    spider, svrg = (mean_squared_errors(kind, oracle, path, repetitions=30) for kind in (SpiderGDA, SVRGGDA))
    ratio = {k: svrg[k] / spider[k] for k in (1, 4, 16, 44)}
    assert ratio[1] == pytest.approx(1.0, abs=0.35)
    assert 2 < ratio[4] < 7
    assert 8 < ratio[16] < 32
    assert 20 < ratio[44] < 90


def mean_squared_errors(kind: Any, oracle: Oracle, path: list[Point], repetitions: int) -> list[float]:
    method = kind(1.0, 1.0, batch_size=16, period=100)
    exact = [oracle.full(point.x, point.y) for point in path]
    draw = torch.Generator().manual_seed(3)
    errors = [0.0] * len(path)
    for _ in range(repetitions):
        anchor, (grad_x, grad_y) = path[0], exact[0]
        for k in range(1, len(path)):
            state = Anchored(path[k].x, path[k].y, anchor, grad_x, grad_y, k, 0, path[k])
            found_x, found_y = method._estimate(oracle, state, draw)
            errors[k] += float((found_x - exact[k][0]).square().sum() + (found_y - exact[k][1]).square().sum())
            if kind.recursive:
                anchor, grad_x, grad_y = path[k], found_x, found_y
    return errors


def test_the_incumbent_is_drawn_uniformly_from_the_inner_iterates() -> None:
    problem = game(3, 2, 2, 2, 2.0, 0.1)
    x, y = start(problem)
    oracle = oracle_of(problem, x, y)
    method = SpiderGDA(0.05, 0.05, batch_size=1, period=3, num_inner=4)
    draw = torch.Generator().manual_seed(0)
    counts = [0, 0, 0, 0]
    for _ in range(400):
        state, path = method.start(oracle, x, y, draw), []
        for _ in range(4):
            path.append(state.x)
            state = method.step(oracle, state, draw)
        counts[next(k for k, iterate in enumerate(path) if torch.equal(iterate, state.x))] += 1
    assert sum((count - 100) ** 2 / 100 for count in counts) < 16.3  # chi-square, 3 degrees, 0.1 %


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_with_equal_components_every_method_is_gda(num: int, batch_size: int, seed: int) -> None:
    one = game(1, 3, 2, 2, 3.0, 0.5, seed)
    same = Game(*(entry.expand(num, -1) for entry in (one.p, one.q, one.r, one.s)), one.saddle_x, one.saddle_y)
    x, y = start(one, seed)
    options: dict[str, Any] = {"batch_size": batch_size, "period": 3, "num_inner": 50, "output_rule": "last"}
    wanted = minimax(None, x, y, num, method=GDA(0.1, 0.05), jac=same.jac, max_iterations=20)
    for method in (SpiderGDA(0.1, 0.05, **options), SVRGGDA(0.1, 0.05, **options)):
        found = minimax(None, x, y, num, method=method, jac=same.jac, max_iterations=20, seed=seed)
        torch.testing.assert_close((found.x, found.y), (wanted.x, wanted.y), rtol=1e-10, atol=1e-10)


def test_the_proximal_term_is_exact_in_the_recursion() -> None:
    """The inner loop on f with the term added outside is the inner loop on components that contain it."""
    problem = game(9, 3, 4, 2, 5.0, 0.3)
    x, y = start(problem)

    def tilted(at_x: Tensor, at_y: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        grad_x, grad_y = problem.jac(at_x, at_y, indices)
        return grad_x + 2.0 * (at_x - x), grad_y

    inner = SpiderGDA(0.05, 0.05, batch_size=2, period=5, num_inner=8, output_rule="last")
    found = minimax(None, x, y, 9, method=AccSpiderGDA(inner, beta=2.0), jac=problem.jac, max_iterations=7, seed=2)
    wanted = minimax(None, x, y, 9, method=inner, jac=tilted, max_iterations=7, seed=2)
    torch.testing.assert_close((found.x, found.y), (wanted.x, wanted.y), rtol=1e-10, atol=1e-12)
    assert found.nsfo == wanted.nsfo


def test_an_outer_step_extrapolates_the_centre() -> None:
    problem = game(4, 3, 3, 3, 2.0, 0.2)
    x, y = start(problem)
    method = AccSpiderGDA(GDA(0.1, 0.1), beta=1.0, gamma=0.9, num_restarts=2)
    oracle, draw = oracle_of(problem, x, y), torch.Generator().manual_seed(0)
    state = method.start(oracle, x, y, draw)
    for _ in range(2):
        state = method.step(oracle, state, draw)
    torch.testing.assert_close(state.centre, state.x + 0.9 * (state.x - x))
    assert (state.num_done, state.num_outer) == (0, 1)
    first = state.x
    for _ in range(2):
        state = method.step(oracle, state, draw)
    torch.testing.assert_close(state.centre, state.x + 0.9 * (state.x - first))
    assert (state.num_done, state.num_outer) == (0, 2)


def test_outer_steps_contract_as_the_theory_says() -> None:
    """Exact sub-problems, β = 2 L, γ = 0: the primal gap shrinks by at least 1 − μₓ/(2 β + μₓ) an outer step."""
    problem = game(30, 4, 3, 4, 20.0, 0.3)
    hessian_x, hessian_y = problem.p.T @ problem.p / 30, problem.q.T @ problem.q / 30
    cross = problem.r.T @ problem.s / 30
    primal = hessian_x + cross @ torch.linalg.solve(hessian_y, cross.T)
    whole = torch.cat([torch.cat([hessian_x, cross], 1), torch.cat([cross.T, -hessian_y], 1)])
    smoothness = float(torch.linalg.eigvalsh(whole).abs().max())
    mu_x, beta = float(torch.linalg.eigvalsh(hessian_x)[0]), 2 * smoothness
    x, y = start(problem)
    gaps: list[float] = []

    def record(moment: Any) -> None:
        if moment.state.num_done == 0:
            u = moment.state.x - problem.saddle_x
            gaps.append(float(u @ primal @ u) / 2)

    method = AccSpiderGDA(GDA(0.3 / (smoothness + beta), 0.3 / smoothness), beta=beta, num_restarts=400)
    minimax(None, x, y, 30, method=method, jac=problem.jac, max_iterations=3200, callback=record)
    assert len(gaps) == 9
    ratios = [after / before for before, after in pairwise(gaps)]
    assert 0.3 < max(ratios) <= 1 - mu_x / (2 * beta + mu_x)


@pytest.fixture(scope="module")
def pl_game() -> tuple[Game, float]:
    """A PL game of condition 20 and the best gradient norm that full-batch steps reach in 48 passes, of 9 pairs."""
    problem = game(500, 10, 10, 5, 20.0, 0.3)
    x, y = start(problem)
    pairs = [(step_x, step_y) for step_x in (0.1, 0.3, 1.0) for step_y in (0.1, 0.3, 1.0)]
    norms = [
        minimax(None, x, y, 500, method=GDA(*pair), jac=problem.jac, max_iterations=48).grad_norm for pair in pairs
    ]
    return problem, min(norms)


@pytest.mark.parametrize("kind", slow_but([SVRGGDA], [SpiderGDA, SVRGGDA]))
def test_variance_reduction_beats_full_gradients_at_equal_calls(kind: Any, pl_game: tuple[Game, float]) -> None:
    problem, full_batch = pl_game
    x, y = start(problem)
    method = kind(0.03, 0.1, output_rule="last", batches="shared")
    result = minimax(None, x, y, 500, method=method, jac=problem.jac, max_iterations=16 * 500, keep_history=True)
    assert result.nsfo == 16 * (500 + 2 * 499) + 500  # 48 passes, each inner step counted twice, and the end
    assert result.grad_norm < full_batch / 10
    assert result.history["residual"][0] > 0.5


@pytest.mark.slow
def test_linear_convergence_in_full_size() -> None:
    problem = game(2000, 10, 10, 5, 20.0, 0.3)
    x, y = start(problem)
    method = SpiderGDA(0.03, 0.1, output_rule="last")
    result = minimax(None, x, y, 2000, method=method, jac=problem.jac, max_iterations=16 * 2000, keep_history=True)
    logs = np.log10(result.history["residual"])
    assert result.grad_norm < 5e-3
    assert np.corrcoef(np.arange(len(logs)), logs)[0, 1] < -0.9


def test_autograd_and_given_gradients_agree_on_every_kind_of_variables() -> None:
    problem = game(8, 4, 3, 3, 4.0, 0.2)
    x, y = start(problem)
    method = SpiderGDA(0.1, 0.1, batch_size=2, period=4)
    options: dict[str, Any] = {"method": method, "max_iterations": 30, "seed": 4}
    wanted = minimax(None, x, y, 8, jac=problem.jac, **options)
    by_autograd = minimax(problem.fun, x, y, 8, **options)
    torch.testing.assert_close((by_autograd.x, by_autograd.y), (wanted.x, wanted.y))
    assert by_autograd.fun == pytest.approx(float(problem.fun(wanted.x, wanted.y, torch.arange(8))))

    def of_mapping(x: dict[str, Tensor], y: Tensor, indices: Tensor) -> Tensor:
        return problem.fun(torch.cat([x["a"].flatten(), x["b"]]), y, indices)

    mapped = minimax(of_mapping, {"a": x[:2].view(1, 2), "b": x[2:]}, y, 8, max_batch=3, **options)
    assert mapped.x["a"].shape == (1, 2)
    torch.testing.assert_close(torch.cat([mapped.x["a"].flatten(), mapped.x["b"]]), wanted.x)

    def of_numpy(x: np.ndarray, y: np.ndarray, indices: Tensor) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(x, np.ndarray)
        grads = problem.jac(torch.from_numpy(x), torch.from_numpy(y), indices)
        return grads[0].numpy(), grads[1].numpy()

    numpy = minimax(None, x.numpy(), y.numpy(), 8, jac=of_numpy, **options)
    assert isinstance(numpy.x, np.ndarray)
    np.testing.assert_allclose(numpy.x, wanted.x.numpy(), rtol=1e-12)
    single = minimax(lambda x, y, i: problem.fun(x.double(), y.double(), i).float(), x.float(), y.float(), 8, **options)
    assert single.x.dtype == torch.float32


@pytest.mark.parametrize("rule", ["last", "uniform"])
@pytest.mark.parametrize("limit", ["max_evaluations", "callback"])
def test_a_limit_leaves_the_output_rule_in_force(rule: Any, limit: str) -> None:
    """Too large steps leave the saddle, so that the best point measured is an early one and no rule's."""
    problem = game(20, 3, 3, 3, 2.0, 0.2)
    x, y = problem.saddle_x + 1e-3, problem.saddle_y + 1e-3
    method = SpiderGDA(4.0, 4.0, batch_size=4, period=5, output_rule=rule)
    states: list[Any] = []

    def look(moment: Any) -> bool:
        states.append(moment.state)
        return limit == "callback" and moment.nit >= 13

    limits: dict[str, Any] = {"max_evaluations": 400} if limit == "max_evaluations" else {}
    result = minimax(None, x, y, 20, method=method, jac=problem.jac, max_iterations=1000, check_every=1, callback=look,
                     keep_history=True, **limits)  # fmt: skip
    assert result.status is (Status.COMPLETED if limit == "max_evaluations" else Status.STOPPED)
    expected = states[-1].kept if rule == "uniform" else states[-1]
    assert torch.equal(result.x, expected.x)
    assert torch.equal(result.y, expected.y)
    assert result.grad_norm > min(result.history["residual"])


@pytest.mark.parametrize("rtol", [0.0, 1e-12])
@pytest.mark.parametrize("rule", ["last", "uniform"])
def test_all_that_the_oracle_is_asked_for_is_counted(rule: Any, rtol: float) -> None:
    """Measurements too, and that of a point returned which was never measured on the way."""
    problem, asked = game(20, 3, 3, 3, 2.0, 0.2), [0]

    def jac(x: Tensor, y: Tensor, indices: Tensor) -> Any:
        asked[0] += len(indices)
        return problem.jac(x, y, indices)

    x, y = start(problem)
    method = SpiderGDA(0.1, 0.1, batch_size=4, period=10**6, output_rule=rule, batches="shared")
    result = minimax(None, x, y, 20, method=method, jac=jac, max_iterations=10, rtol=rtol, check_every=1)
    num_steps_s = 20 + 9 * 2 * 4  # one anchor, then a batch at both ends of each step
    assert asked[0] == result.nsfo == result.nfev == num_steps_s + (10 + (rule == "uniform")) * 20


def test_tolerance_and_budget_end_the_run() -> None:
    problem = game(20, 3, 3, 3, 2.0, 0.2)
    x, y = start(problem)
    method = SpiderGDA(0.1, 0.1, batch_size=4, period=5, output_rule="last")
    done = minimax(None, x, y, 20, method=method, jac=problem.jac, max_iterations=10_000, rtol=1e-6)
    assert (done.status, done.success) == (Status.CONVERGED, True)
    torch.testing.assert_close(done.x, problem.saddle_x, rtol=1e-4, atol=1e-4)
    spent = minimax(
        None, x, y, 20, method=method, jac=problem.jac, max_iterations=10_000, rtol=1e-9, max_evaluations=200
    )
    assert (spent.status, spent.success) == (Status.MAX_EVALUATIONS, False)
    assert 200 <= spent.nsfo <= 200 + 8 + 20  # a step, and at most one more full gradient: that of the last measurement


def test_a_bad_oracle_ends_with_the_best_point() -> None:
    problem = game(20, 3, 3, 3, 2.0, 0.2)
    x, y = start(problem)
    calls = 0

    def broken(x: Tensor, y: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        grads = problem.jac(x, y, indices)
        return (grads[0] * torch.nan, grads[1]) if calls > 40 else grads

    result = minimax(None, x, y, 20, method=SpiderGDA(0.1, 0.1, period=5), jac=broken, max_iterations=100)
    assert result.status is Status.NOT_FINITE
    assert torch.isfinite(result.x).all()
    assert not torch.equal(result.x, x)
    wild = minimax(None, x, y, 20, method=GDA(50.0, 50.0), jac=problem.jac, max_iterations=200)
    assert wild.status is Status.DIVERGED
    assert "smaller steps" in wild.message


def test_the_one_sided_outputs_are_uniform_over_the_path() -> None:
    problem = game(4, 2, 2, 2, 2.0, 0.2)
    x, y = start(problem)
    method = AccSpiderGDA(GDA(0.1, 0.1), beta=1.0, output_rule="uniform")
    outputs = Counter(
        tuple(minimax(None, x, y, 4, method=method, jac=problem.jac, max_iterations=3, seed=seed).x.tolist())
        for seed in range(90)
    )
    assert len(outputs) == 3
    assert tuple(x.tolist()) not in outputs
    assert all(15 <= times <= 45 for times in outputs.values())


def test_constants_of_the_theory() -> None:
    planned = theory.spider(400, smoothness=2.0, mu_x=0.5, mu_y=1.0, accuracy=1e-3)
    method = planned.method
    assert isinstance(method, SpiderGDA)
    assert (method.period, method.batch_size, method.step_y) == (20, 20, 0.1)
    assert method.step_x == pytest.approx(0.1 / (24 * 32 * 4))
    assert method.num_inner == pytest.approx(4224 / (0.5 * method.step_x), abs=1)
    assert planned.max_iterations == 7 * method.num_inner
    one_sided = theory.spider(400, 2.0, 0.5, 1.0, 0.1, one_sided=True)
    assert one_sided.max_iterations == pytest.approx(64 / (method.step_x * 0.01), abs=1)
    mended, printed = (
        theory.acc_spider(400, 2.0, 0.5, 1.0, 1e-3, 1.0, as_printed=flag).method for flag in (False, True)
    )
    assert (mended.inner.step_x, printed.inner.step_x) == (1 / 30, 1 / 20)  # type: ignore[union-attr]
    assert printed.inner.step_x / printed.inner.step_y == pytest.approx(24 * 128)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="0 < mu ≤ smoothness"):
        theory.spider(10, 1.0, 2.0, 1.0, 0.1)


def test_mistakes_are_named() -> None:
    x = torch.zeros(2, dtype=torch.float64)
    fine: dict[str, Any] = {"method": GDA(0.1, 0.1), "max_iterations": 2}
    for kind in (GDA, SpiderGDA, SVRGGDA):
        with pytest.raises(UserError, match="positive step sizes"):
            kind(0.1, -1.0)
    with pytest.raises(UserError, match="batch_size of at least 1"):
        SpiderGDA(0.1, 0.1, batch_size=0)
    with pytest.raises(UserError, match="output_rule 'uniform'"):
        SpiderGDA(0.1, 0.1, output_rule="best")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="gamma in"):
        AccSpiderGDA(GDA(0.1, 0.1), beta=1.0, gamma=1.0)
    with pytest.raises(UserError, match="output_rule 'last'"):
        AccSpiderGDA(GDA(0.1, 0.1), beta=1.0, output_rule="best")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="fun or jac is needed"):
        minimax(None, x, x, 3, **fine)
    with pytest.raises(UserError, match="jac is needed"):
        minimax(lambda x, y, i: x.sum(), x.numpy(), x, 3, **fine)
    with pytest.raises(UserError, match="num_components"):
        minimax(lambda x, y, i: x.sum(), x, x, 0, **fine)
    with pytest.raises(UserError, match="differentiable scalar"):
        minimax(lambda x, y, i: x + y, x, x, 3, **fine)
    with pytest.raises(UserError, match="returns \\(gradient in x"):
        minimax(None, x, x, 3, jac=lambda x, y, i: x, **fine)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="the gradient in y of shape"):
        minimax(None, x, x, 3, jac=lambda x, y, i: (x, y[:1]), **fine)
    with pytest.raises(UserError, match="as a mapping"):
        minimax(None, {"a": x}, x, 3, jac=lambda x, y, i: (3.0, y), **fine)
    with pytest.raises(UserError, match="one dtype"):
        minimax(lambda x, y, i: x.sum(), x, x.float(), 3, **fine)
    with pytest.raises(UserError, match="finite x0"):
        minimax(lambda x, y, i: x.sum(), x / 0, x, 3, **fine)
    with pytest.raises(UserError, match="x0 of one dtype"):
        minimax(lambda x, y, i: y.sum(), {"a": x, "b": x.float()}, x, 3, **fine)
    with pytest.raises(UserError, match="empty mapping"):
        minimax(lambda x, y, i: y.sum(), {}, x, 3, **fine)
    with pytest.raises(UserError, match="x0 of numbers"):
        minimax(lambda x, y, i: y.sum(), ["a"], x, 3, **fine)
    with pytest.raises(UserError, match="non-negative int"):
        minimax(lambda x, y, i: x.sum(), x, x, 3, seed=-1, **fine)
    with pytest.raises(UserError, match="a generator on cpu"):
        minimax(lambda x, y, i: x.sum(), x, x, 3, seed=_Elsewhere(), **fine)


class _Elsewhere(torch.Generator):
    """A generator that says it lives on another device."""

    device = torch.device("meta")


@pytest.mark.parametrize("make", [SVRGGDA, SpiderGDA])
@pytest.mark.parametrize(
    ("period", "num_inner", "expected"), [(7, 4, 4), (3, 9, 3), (None, 5, 5), (6, None, 6), (None, None, 20)]
)
def test_residuals_are_measured_as_often_as_full_gradients_are_taken(
    make: Any, period: int | None, num_inner: int | None, expected: int
) -> None:
    assert make(step_x=0.1, step_y=0.1, period=period, num_inner=num_inner).check_every(20) == expected


def test_the_accelerated_plan_has_the_outer_steps_that_its_contraction_asks_for() -> None:
    """Each outer step leaves 1 − μₓ/(2 β + μₓ) of the gap, β = 2 L; μₓ = 0.5 and L = 1 leave 8/9 each."""
    planned = theory.acc_spider(4, 1.0, 0.5, 0.5, 0.1, gap=10.0)
    inner = planned.method.restart_length(4)
    assert planned.max_iterations == inner * int(np.ceil(np.log(100) / np.log(9 / 8)))
