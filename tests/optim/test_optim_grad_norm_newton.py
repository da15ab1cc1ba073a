"""Gradient-norm regularised Newton: closed forms on quadratics, the published iteration counts, and every solver."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.numerics.seeds import seeded
from trainwright.optim.grad_norm_newton import GradNormSmoothNewton
from trainwright.optim.shifted_systems import MatrixFree, Metric


def vector(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def run(
    x: nn.Parameter, loss: Callable[[], Tensor], target: float, limit: int = 1000, hessian: Any = None, **options: Any
) -> tuple[int, int]:
    """Steps until the loss is below `target`; returns them and the solves, and checks what every step owes."""
    optimizer = GradNormSmoothNewton([x], **options)
    num_steps = num_solves = 0
    with torch.no_grad():
        value = float(loss())
    while value > target and num_steps < limit:
        returned = optimizer.step(loss, hessian)
        with torch.no_grad():
            after = float(loss())
        assert float(returned) == value
        assert after < value
        num_steps, num_solves = num_steps + 1, num_solves + int(optimizer.state[x]["rejected"]) + 1
        value = after
    assert (
        num_solves <= 3 * num_steps
    )  # at most two rejections a step on average: a success doubles, a rejection halves
    return num_steps, num_solves


def test_a_quadratic_never_backtracks_and_follows_the_closed_form() -> None:
    """γ_k = 2^k, g_{k+1} = λ_k (A + λ_k I)⁻¹ g_k, and no step is longer than γ_k."""
    half = torch.randn(7, 7, generator=seeded(0), dtype=torch.float64)
    matrix, center = (
        half @ half.T + 0.01 * torch.eye(7, dtype=torch.float64),
        torch.linspace(-2, 1, 7, dtype=torch.float64),
    )
    x = vector(*range(7))
    optimizer = GradNormSmoothNewton([x])
    for count in range(9):
        gradient, before = matrix @ (x.detach() - center), x.detach().clone()
        optimizer.step(lambda: 0.5 * (x - center) @ matrix @ (x - center))
        shift = gradient.norm() / 2.0**count
        expected = shift * torch.linalg.solve(matrix + shift * torch.eye(7, dtype=torch.float64), gradient)
        assert (matrix @ (x.detach() - center) - expected).norm() <= 1e-12 * max(1.0, float(expected.norm()))
        assert (x.detach() - before).norm() <= 2.0**count
        assert optimizer.state[x]["rejected"] == 0
        assert optimizer.state[x]["gamma"] == 2.0 ** (count + 1)


class LogSumExp:
    """μ log Σ exp((⟨a_i, x⟩ - b_i)/μ), a_i and b_i uniform in (-1, 1), the a_i shifted so that the optimum is 0."""

    def __init__(self, num_dims: int, mu: float, seed: int) -> None:
        draw = seeded(seed)
        self.raw = torch.rand(num_dims, num_dims, generator=draw, dtype=torch.float64) * 2 - 1
        self.b, self.mu = torch.rand(num_dims, generator=draw, dtype=torch.float64) * 2 - 1, mu
        self.a = self.raw - torch.softmax(-self.b / mu, 0) @ self.raw
        self.x = nn.Parameter(torch.ones(num_dims, dtype=torch.float64))
        self.minimum = float(mu * torch.logsumexp(-self.b / mu, 0))

    def loss(self) -> Tensor:
        return self.mu * torch.logsumexp((self.a @ self.x - self.b) / self.mu, 0) - self.minimum

    def gauss_newton(self) -> Tensor:
        return self.factor() @ self.factor().T

    def factor(self) -> Tensor:
        shares = torch.softmax((self.a @ self.x.detach() - self.b) / self.mu, 0)
        return self.a.T * (shares / self.mu).sqrt()

    def exact(self) -> Tensor:
        shares = torch.softmax((self.a @ self.x.detach() - self.b) / self.mu, 0)
        mean = self.a.T @ shares
        return self.gauss_newton() - torch.outer(mean, mean) / self.mu


@pytest.mark.parametrize(
    ("kind", "num_dims", "mu", "by_data", "steps", "solves"),
    [
        ("exact", 200, 1.0, True, 17, 26),
        ("gauss_newton", 200, 1.0, True, 36, 66),
        ("exact", 100, 0.1, False, 88, 175),
        ("gauss_newton", 100, 0.1, False, 208, 415),
    ],
)
def test_log_sum_exp_takes_the_published_number_of_iterations(
    kind: str, num_dims: int, mu: float, by_data: bool, steps: int, solves: int
) -> None:
    """To f - f* < 1e-8 from x = 1; B = AᵀA in the first pair, I in the second; within 20 %."""
    problem = LogSumExp(num_dims, mu, seed=1 if by_data else 0)
    metric = problem.raw.T @ problem.raw if by_data else None
    found = run(problem.x, problem.loss, 1e-8, hessian=getattr(problem, kind), metric=metric)
    assert abs(found[0] / steps - 1) <= 0.2
    assert abs(found[1] / solves - 1) <= 0.2


def rosenbrock(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def test_rosenbrock_takes_51_iterations_and_the_gradient_method_thousands() -> None:
    x, slow = vector(-2.0, 2.0), vector(-2.0, 2.0)
    assert abs(run(x, lambda: rosenbrock(x), 1e-8)[0] - 51) <= 5
    optimizer = GradNormSmoothNewton([slow], solver="gradient")
    for _ in range(500):
        optimizer.step(lambda: rosenbrock(slow))
    assert rosenbrock(slow) > 1e-3


def test_a_chebyshev_chain_by_the_fisher_term_alone() -> None:
    """f = ‖u‖⁴/4, u_1 = (x_1 - 1)/2, u_{i+1} = x_{i+1} - 2x_i² + 1, n = 100, H = 2(Jᵀu)(Jᵀu)ᵀ: at most 25 iterations."""
    x = nn.Parameter(torch.full((100,), 2.0, dtype=torch.float64))

    def residual(point: Tensor) -> Tensor:
        return torch.cat([(point[:1] - 1) / 2, point[1:] - 2 * point[:-1] ** 2 + 1])

    def factor() -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            u = residual(point)
            return 2**0.5 * torch.autograd.grad(u, point, u.detach())[0]

    assert run(x, lambda: residual(x).norm() ** 4 / 4, 1e-8, hessian=factor, solver="low_rank")[0] <= 25


@pytest.mark.parametrize("metric", ["none", "diagonal", "dense"])
def test_every_solver_takes_the_same_steps(metric: str) -> None:
    """Dense, low rank and matrix-free, with the same Gauss–Newton matrix and metric."""
    paths = []
    for solver in ("dense", "low_rank", "cg"):
        problem = LogSumExp(12, 0.5, seed=3)
        matrices = {"none": None, "diagonal": torch.linspace(1, 4, 12), "dense": problem.raw.T @ problem.raw}
        hessian = {
            "dense": problem.gauss_newton,
            "low_rank": problem.factor,
            "cg": lambda problem=problem: problem.gauss_newton().__matmul__,
        }[solver]
        own = matrices[metric]
        optimizer = GradNormSmoothNewton(
            [problem.x], solver=solver, metric=None if own is None else own.double(), cg_rtol=1e-13
        )
        for _ in range(8):
            optimizer.step(problem.loss, hessian)
        paths.append(problem.x.detach())
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(paths[0], paths[2], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("solver", ["dense", "cg"])
def test_without_a_hessian_it_is_the_exact_one(solver: str) -> None:
    """Over two parameters, one of which the loss does not use in one step of two, equal to the analytic Hessian."""
    problem, split = LogSumExp(10, 0.5, seed=2), LogSumExp(10, 0.5, seed=2)
    parts = [nn.Parameter(split.x.detach()[:4].clone()), nn.Parameter(split.x.detach()[4:].clone())]
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def loss() -> Tensor:
        split.x = torch.cat(parts)  # type: ignore[assignment]
        return split.loss()

    first = GradNormSmoothNewton([problem.x])
    second = GradNormSmoothNewton([parts[0], unused, parts[1]], solver=solver, cg_rtol=1e-13)
    for _ in range(7):
        first.step(problem.loss, problem.exact)
        second.step(loss)
    torch.testing.assert_close(torch.cat(parts), problem.x, rtol=1e-7, atol=1e-9)
    assert unused.tolist() == [1.0, 1.0, 1.0]


def test_maximising_is_minimising_the_negation() -> None:
    down, up = vector(-2.0, 2.0), vector(-2.0, 2.0)
    first, second = GradNormSmoothNewton([down]), GradNormSmoothNewton([up], maximize=True, solver="cg", cg_rtol=1e-14)
    for _ in range(10):
        first.step(lambda: rosenbrock(down))
        second.step(lambda: -rosenbrock(up))
    torch.testing.assert_close(up, down, rtol=1e-8, atol=1e-10)


def test_saddles_are_rejected_trials_until_the_shift_suffices() -> None:
    """At an indefinite Hessian with a large first γ, H + λB is not positive definite: rejected, never applied."""
    x = vector(0.3, -0.2)
    optimizer = GradNormSmoothNewton([x], gamma=100.0)
    loss = optimizer.step(lambda: x[0] ** 2 - x[1] ** 2 + 0.1 * (x**4).sum())
    assert optimizer.state[x]["rejected"] >= 2
    assert x[0] ** 2 - x[1] ** 2 + 0.1 * (x**4).sum() < loss


def test_a_search_that_fails_leaves_everything_but_the_count() -> None:
    """At the optimum but for rounding, f - f⁺ is noise."""
    x = vector(1.0, 1.0)
    optimizer = GradNormSmoothNewton([x], max_trials=3)
    noise = iter(float(value) for value in range(100))
    optimizer.step(lambda: (x**2).sum() + 10 * next(noise))
    assert x.tolist() == [1.0, 1.0]
    assert (optimizer.state[x]["rejected"], optimizer.state[x]["gamma"]) == (3, 1 / 8)
    assert optimizer.status == "rejected"


def test_at_rounding_error_it_says_that_it_stalled_and_tries_no_more() -> None:
    x = vector(-2.0, 2.0)
    optimizer, calls = GradNormSmoothNewton([x]), [0]
    assert optimizer.status == "new"

    def loss() -> Tensor:
        calls[0] += 1
        return rosenbrock(x) + 1e6

    seen = []
    for _ in range(120):
        optimizer.step(loss)
        seen.append(optimizer.status)
    assert seen[0] == "accepted"
    assert seen[-1] == "stalled"
    assert seen.count("rejected") <= 3
    before, point = calls[0], x.tolist()
    optimizer.step(loss)
    assert calls[0] == before + 1
    assert x.tolist() == point
    with torch.no_grad():
        x.copy_(torch.tensor([-1.0, 2.0]))
    optimizer.step(loss)
    assert optimizer.status == "accepted"
    assert rosenbrock(x) < 104


def test_frozen_parameters_count_and_stay() -> None:
    x, frozen = vector(-2.0, 2.0), nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    alone = vector(-2.0, 2.0)
    for solver in ("dense", "cg", "gradient"):
        first, second = GradNormSmoothNewton([frozen, x], solver=solver), GradNormSmoothNewton([alone], solver=solver)
        for _ in range(5):
            first.step(lambda: rosenbrock(x) * frozen[0])
            second.step(lambda: rosenbrock(alone))
        torch.testing.assert_close(x, alone, rtol=1e-9, atol=1e-9)
        assert frozen.tolist() == [1.0, 1.0]


def test_a_closure_that_raises_leaves_the_parameters() -> None:
    x, calls = vector(1.0, 2.0), [0]

    def loss() -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyError("data")
        return (x**2).sum()

    with pytest.raises(KeyError):
        GradNormSmoothNewton([x]).step(loss)
    assert x.tolist() == [1.0, 2.0]


def test_a_learning_rate_below_one_shortens_the_accepted_step() -> None:
    whole, short = vector(-2.0, 2.0), vector(-2.0, 2.0)
    GradNormSmoothNewton([whole]).step(lambda: rosenbrock(whole))
    GradNormSmoothNewton([short], lr=0.25).step(lambda: rosenbrock(short))
    start = torch.tensor([-2.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(short - start, 0.25 * (whole - start), rtol=1e-12, atol=1e-12)


def test_at_a_stationary_point_nothing_happens() -> None:
    x = vector(0.0, 0.0)
    GradNormSmoothNewton([x]).step(lambda: (x**2).sum())
    assert x.tolist() == [0.0, 0.0]


def test_resume_is_bit_for_bit() -> None:
    x = vector(-2.0, 2.0)
    optimizer = GradNormSmoothNewton([x])
    for _ in range(9):
        optimizer.step(lambda: rosenbrock(x))
    other = nn.Parameter(x.detach().clone())
    again = GradNormSmoothNewton([other])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(9):
        optimizer.step(lambda: rosenbrock(x))
        again.step(lambda: rosenbrock(other))
    assert torch.equal(x, other)


def test_sharded_parameters_take_the_same_steps(pool2: Pool) -> None:
    found = pool2.run("tests.second_order_cases:newton_on_shards")
    assert max(rank["worst"] for rank in found) < 1e-9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: GradNormSmoothNewton([x], lr=-1.0), "lr of at least 0"),
        (lambda x: GradNormSmoothNewton([x], solver="qr"), "solver among dense, low_rank, cg, gradient; got 'qr'"),
        (lambda x: GradNormSmoothNewton([x], gamma=0.0), "gamma above 0"),
        (lambda x: GradNormSmoothNewton([x], min_gamma=0.0), "min_gamma above 0"),
        (lambda x: GradNormSmoothNewton([x], max_trials=0), "max_trials of at least 1"),
        (lambda x: GradNormSmoothNewton([x], cg_rtol=1.0), r"cg_rtol in \(0, 1\)"),
        (lambda x: GradNormSmoothNewton([x], fused=True), "fused False"),
        (lambda x: GradNormSmoothNewton([x], capturable=True), "capturable False"),
        (lambda x: GradNormSmoothNewton([x], metric=torch.ones(3)), r"a metric of shape \(2,\) or \(2, 2\)"),
        (lambda x: GradNormSmoothNewton([x], metric=torch.tensor([1.0, -1.0])), "a positive definite metric"),
        (lambda x: GradNormSmoothNewton([x], metric=-torch.eye(2)), "a positive definite metric"),
        (lambda x: GradNormSmoothNewton([{"params": [x]}, {"params": [vector(1.0)]}]), "needs one group"),
        (lambda x: GradNormSmoothNewton([x]).step(), "GradNormSmoothNewton needs a closure"),
        (
            lambda x: GradNormSmoothNewton([x]).step(lambda: x.sum().detach()),
            "with its graph is needed; got one without",
        ),
        (lambda x: GradNormSmoothNewton([x]).step(lambda: (x * torch.nan).sum()), "a finite loss and gradient"),
        (
            lambda x: GradNormSmoothNewton([x], solver="low_rank").step(lambda: (x**2).sum()),
            "needs a factor of the Hessian",
        ),
        (
            lambda x: GradNormSmoothNewton([x], solver="low_rank").step(lambda: (x**2).sum(), lambda: torch.ones(3, 1)),
            r"hessian of shape \(2, r\); got \(3, 1\)",
        ),
        (
            lambda x: GradNormSmoothNewton([x]).step(lambda: (x**2).sum(), lambda: torch.ones(2)),
            r"hessian of shape \(2, 2\); got \(2,\)",
        ),
    ],
)
def test_mistakes_are_named_and_change_nothing(call: Any, message: str) -> None:
    x = vector(1.0, 2.0)
    with pytest.raises(UserError, match=message):
        call(x)
    assert x.tolist() == [1.0, 2.0]


def test_conjugate_gradients_are_preconditioned_by_the_metric() -> None:
    """Of a Hessian that vanishes the system is the metric itself, however scaled: solved in one step."""
    scales = torch.logspace(-3, 3, 6, dtype=torch.float64)
    gradient = torch.arange(1.0, 7.0, dtype=torch.float64)
    system = MatrixFree(torch.zeros_like, gradient, Metric(scales, 6), rtol=1e-12, max_steps=1)
    found = system.solve(0.5)
    assert found is not None
    torch.testing.assert_close(found, -gradient / (0.5 * scales), rtol=1e-12, atol=0.0)
