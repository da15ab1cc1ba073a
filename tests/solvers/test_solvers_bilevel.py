"""Bilevel solvers on problems whose hypergradient has a closed form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.solvers import bilevel_problems
from tests.grids import slow_but
from trainwright.artifacts import UserError
from trainwright.solvers.bilevel import BOREP, BSVRB, bilevel
from trainwright.solvers.bilevel.problem import Blocks
from trainwright.solvers.outcome import Status
from trainwright.solvers.values import Packing


class Quadratics:
    """g_i = y'A_i y/2 - y'B_i x, f_i = |y - c_i|²/2 + .05 |x|², with additive noise on gradients."""

    def __init__(self, num_blocks: int = 20, dx: int = 5, dy: int = 6, noise: float = 0.3, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        roots = draw(num_blocks, dy, dy)
        self.A = 0.1 * roots @ roots.mT + 0.6 * torch.eye(dy, dtype=torch.float64)
        self.B, self.c, self.noise = draw(num_blocks, dy, dx) / 2, draw(num_blocks, dy) + 1.0, noise
        self.x0, self.y0 = 2.0 + draw(dx), draw(num_blocks, dy)

    def sample(self, blocks: Tensor, generator: torch.Generator) -> Any:
        num, dy, dx = len(blocks), self.c.shape[1], len(self.x0)
        shapes = ((num, dy), (num, dy), (num, dx))
        return [self.noise * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def lower(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        A, B = self.A[blocks], self.B[blocks]
        value = torch.einsum("ia,iab,ib->i", y, A, y) / 2 - torch.einsum("ia,iax,x->i", y, B, x)
        return value if batch is None else value + (y * batch[0]).sum(1)

    def upper(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        value = (y - self.c[blocks]).square().sum(1) / 2 + 0.05 * x.square().sum()
        return value if batch is None else value + (y * batch[1]).sum(1) + (x * batch[2]).sum(1)

    def hypergradient(self, x: Tensor) -> Tensor:
        y = torch.linalg.solve(self.A, torch.einsum("iax,x->ia", self.B, x))
        v = torch.linalg.solve(self.A, y - self.c)
        return torch.einsum("iax,ia->ix", self.B, v).mean(0) + 0.1 * x

    def grad_norm(self, x: Tensor) -> float:
        return float(self.hypergradient(x).norm())

    def run(self, method: Any, num_steps: int, noisy: bool = True, **options: Any) -> Any:
        return bilevel(self.upper, self.lower, self.x0, self.y0, method=method, sample=self.sample if noisy else None,
                       max_iterations=num_steps, grad_norm=self.grad_norm, keep_history=True, **options)  # fmt: skip


class AllNoisy(Quadratics):
    """The same with noise on second derivatives too, those of the lower level in y and in both."""

    def sample(self, blocks: Tensor, generator: torch.Generator) -> Any:
        first, dy, dx = super().sample(blocks, generator), self.c.shape[1], len(self.x0)
        own, mixed = (
            self.noise * torch.randn(len(blocks), dy, width, generator=generator, dtype=torch.float64)
            for width in (dy, dx)
        )
        return [*first, (own + own.mT) / 2**0.5, mixed]

    def lower(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        value = super().lower(x, y, blocks, batch)
        if batch is None:
            return value
        # Zero here, and so is its gradient: the noise is in the second derivatives alone.
        by, bx = y - y.detach(), x - x.detach()
        return (
            value + torch.einsum("ia,iab,ib->i", by, batch[3], by) / 2 + torch.einsum("ia,iax,x->i", by, batch[4], bx)
        )


SEEDS = range(5)


def last_fifth(method: BSVRB) -> float:
    """The true hypergradient's norm: the last fifth of 2,500 steps with noise on every oracle, a mean over five problems."""
    ends = []
    for seed in SEEDS:
        sizes = AllNoisy(seed=100 + seed).run(method, 2500, check_every=5, seed=seed).history["residual"]
        ends.append(sum(sizes[-(len(sizes) // 5) :]) / (len(sizes) // 5))
    return sum(ends) / len(ends)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_versions_beat_plain_sampling_over_problems_and_draws() -> None:
    """m = 20, I = 5: at most 0.8 and 0.9 of the plain steps' gradient, with the default averages."""
    settings: dict[str, Any] = {"step_x": 0.003, "step_y": 0.1, "num_sampled": 5, "curvature_floor": 0.5}
    plain = last_fifth(BSVRB(**settings, alpha=1.0, beta=1.0, gamma=0.0))
    assert last_fifth(BSVRB(**settings, version=2)) <= 0.9 * plain
    assert last_fifth(BSVRB(**settings, version=1)) <= 0.8 * plain


@pytest.mark.parametrize(("version", "beta"), [(1, 0.1), (2, 0.03)])
def test_averages_grow_with_the_run_unless_they_are_given(version: Any, beta: float) -> None:
    """At step 1000 of a run, α is 0.03, and β in version 2."""
    problem = AllNoisy()
    packing, x = Packing.of(problem.x0)
    oracle = Blocks(problem.upper, problem.lower, packing, 20)
    common: dict[str, Any] = {"step_x": 0.01, "step_y": 0.1, "num_sampled": 5, "version": version, "gamma": 0.5}
    ends = []
    for method in (BSVRB(**common), BSVRB(**common, alpha=0.03, beta=beta), BSVRB(**common, alpha=0.1, beta=0.1)):
        generator = torch.Generator().manual_seed(0)
        state = method.start(oracle, x, problem.y0)
        for nit in (0, *range(999, 1005)):
            state = method.step(oracle, replace(state, nit=nit), problem.sample, generator)
        ends.append(state.x)
    spread = [float((end - ends[0]).norm()) for end in ends]
    assert spread[1] < 0.01 * spread[2]


@pytest.mark.parametrize(
    ("version", "step_x", "num_steps"), slow_but([(1, 0.01, 250)], [(1, 0.01, 250), (2, 0.01, 400)])
)
def test_the_defaults_converge_under_noise(version: Any, step_x: float, num_steps: int) -> None:
    problem = AllNoisy()
    method = BSVRB(step_x=step_x, step_y=0.1, num_sampled=5, version=version, curvature_floor=0.5)
    sizes = problem.run(method, num_steps, check_every=5).history["residual"]
    assert sum(sizes[-12:]) / 12 < 0.3 * sizes[0]


def test_catching_up_multiplies_both_steps_by_the_iterations_missed() -> None:
    """One block was last touched three iterations ago: y and v move by three steps of their trackers."""
    problem = Quadratics(noise=0.0)
    packing, x = Packing.of(problem.x0)
    oracle = Blocks(problem.upper, problem.lower, packing, 20)
    moved = {}
    for catch_up in (False, True):
        method = BSVRB(step_x=0.01, step_y=0.1, step_v=0.05, num_sampled=20, gamma=0.0, alpha=1.0, catch_up=catch_up)
        generator = torch.Generator().manual_seed(0)
        state = method.step(oracle, method.start(oracle, x, problem.y0), problem.sample, generator)
        late = replace(state, touched=torch.full((20,), 1), nit=3)
        moved[catch_up] = (method.step(oracle, late, problem.sample, generator), late)
    (plain, start), (caught, _) = moved[False], moved[True]
    torch.testing.assert_close(caught.y - start.y, 3 * (plain.y - start.y))
    torch.testing.assert_close(caught.inner - start.inner, 3 * (plain.inner - start.inner))


def test_derivatives_are_those_of_the_closed_form() -> None:
    problem = Quadratics()
    packing, x = Packing.of(problem.x0)
    blocks = torch.tensor([3, 0, 7])
    oracle = Blocks(problem.upper, problem.lower, packing, 20)
    here = oracle.at(x, problem.y0[blocks], blocks, None)
    y, A, B = problem.y0[blocks], problem.A[blocks], problem.B[blocks]
    torch.testing.assert_close(
        here.lower_y.detach(), torch.einsum("iab,ib->ia", A, y) - torch.einsum("iax,x->ia", B, x)
    )
    torch.testing.assert_close(here.hessians(), A)
    v = torch.ones(3, 6, dtype=torch.float64)
    torch.testing.assert_close(here.hessian_times(v), A.sum(2))
    torch.testing.assert_close(here.hypergradient(v), 0.1 * x + torch.einsum("iax,ia->ix", B, v).mean(0))
    assert dict(oracle.counts) == {"nsfo": 6, "nhvp": 3 * 6 + 3 + 3, "nfev": 30}


@pytest.mark.parametrize(("version", "bar"), [pytest.param(1, 1e-4, marks=pytest.mark.slow), (2, 1e-4)])
def test_without_noise_and_with_all_blocks_the_gradient_vanishes(version: Any, bar: float) -> None:
    method = BSVRB(
        step_x=0.03, step_y=0.3, num_sampled=20, version=version, alpha=0.1, beta=0.1, gamma=0.9, curvature_floor=0.5
    )
    result = Quadratics().run(method, 1500 if version == 1 else 750, noisy=False)
    assert result.history["residual"][-1] < bar * result.history["residual"][0]


def direction_error(problem: Quadratics, method: BSVRB, num_steps: int) -> float:
    """The mean distance of the method's direction from the true hypergradient, once under way."""
    errors: list[float] = []

    def look(moment: Any) -> None:
        if moment.nit > num_steps // 3:
            errors.append(float((moment.state.direction - problem.hypergradient(moment.state.old_x)).norm()))

    problem.run(method, num_steps, check_every=3, callback=look)
    return sum(errors) / len(errors)


@pytest.mark.parametrize(
    ("version", "alpha", "gamma", "bar"), slow_but([(2, 0.5, 0.5, 0.65)], [(1, 0.1, 0.9, 0.4), (2, 0.5, 0.5, 0.65)])
)
def test_the_direction_is_nearer_to_the_hypergradient_than_plain_sampling(
    version: Any, alpha: float, gamma: float, bar: float
) -> None:
    problem, common = (
        Quadratics(),
        {"step_x": 0.003, "step_y": 0.1, "num_sampled": 5, "version": version, "curvature_floor": 0.5},
    )
    plain = direction_error(problem, BSVRB(**common, alpha=1.0, beta=1.0, gamma=0.0), 240)
    ours = direction_error(problem, BSVRB(**common, alpha=alpha, beta=0.1, gamma=gamma), 240)
    assert ours <= bar * plain


def test_trackers_with_all_blocks_are_storms() -> None:
    problem = Quadratics()
    packing, x = Packing.of(problem.x0)
    oracle = Blocks(problem.upper, problem.lower, packing, 20)
    method = BSVRB(step_x=0.01, step_y=0.1, num_sampled=20, version=2, alpha=0.3)
    assert method.correction(20) == pytest.approx(0.7)
    generator, state = torch.Generator().manual_seed(0), method.start(oracle, x, problem.y0)
    expected = None
    for _ in range(4):
        before = generator.get_state()
        new_state = method.step(oracle, state, problem.sample, generator)
        generator.set_state(before)
        order = torch.randperm(20, generator=generator)
        batch = problem.sample(order, generator)
        new, old = (
            oracle.at(a, b[order], order, batch).lower_y.detach()
            for a, b in ((state.x, state.y), (state.old_x, state.old_y))
        )
        back = torch.argsort(order)
        expected = new[back] if expected is None else new[back] + 0.7 * (expected - old[back])
        torch.testing.assert_close(new_state.slopes, expected)
        state = new_state


def test_only_chosen_blocks_move_in_version_two() -> None:
    problem = Quadratics()
    result = problem.run(BSVRB(step_x=0.01, step_y=0.1, num_sampled=3, version=2), 1)
    assert int((result.y != problem.y0).any(1).sum()) == 3
    assert result.nsfo == 18
    assert result.nhvp == 12


class Steep(bilevel_problems.Steep):
    def run(self, num_steps: int, seed: int = 0, **options: Any) -> Any:
        method = BOREP(step_y=0.2, step_z=0.1, **{"step_x": 0.01, **options})
        return bilevel(self.upper, self.lower, self.x0, self.y0, method=method, seed=seed,
                       sample=self.sample, max_iterations=num_steps, grad_norm=self.grad_norm, keep_history=True)  # fmt: skip


def mean_end(result: Any) -> float:
    """The mean gradient norm of the last hundred steps; infinite where the run did not get there."""
    if result.status is not Status.COMPLETED:
        return math.inf
    return sum(result.history["residual"][-100:]) / 100


@pytest.mark.slow
def test_normalised_steps_cross_where_plain_ones_overflow() -> None:
    problem = Steep()
    assert problem.grad_norm(problem.x0) > 1e5
    assert mean_end(problem.run(2500, refine_steps=200)) <= 0.15
    for step_x in (1e-1, 1e-2, 1e-3, 1e-4):
        assert mean_end(problem.run(2500, refine_steps=200, step_x=step_x, normalised=False)) == math.inf, step_x


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_normalised_steps_in_full() -> None:
    """Other seeds, plain steps so small that they do not overflow, and y seldom refreshed."""
    problem = Steep()
    for seed in (1, 2):
        assert mean_end(problem.run(4000, refine_steps=200, seed=seed)) <= 0.15
    assert mean_end(problem.run(4000, refine_steps=200, step_x=1e-5, normalised=False)) > 1.0
    assert mean_end(problem.run(4000, num_refinements=0)) <= 0.15
    assert mean_end(problem.run(4000, refine_steps=200, period=20)) <= 0.3


def test_step_length_is_the_step_size_whatever_the_gradient() -> None:
    problem = Steep()
    result = problem.run(1)
    assert float((result.x - problem.x0).norm()) == pytest.approx(0.01, rel=1e-9)


def test_a_mapping_and_a_run_without_the_true_gradient() -> None:
    lower = lambda x, y, blocks, batch: ((y - x["a"] - x["b"]) ** 2).sum(1)  # noqa: E731
    upper = lambda x, y, blocks, batch: ((y - 3) ** 2).sum(1) + (x["b"] ** 2).sum()  # noqa: E731
    start = {"a": torch.ones(1, dtype=torch.float64), "b": torch.ones(1, dtype=torch.float64)}
    method = BOREP(step_x=0.05, step_y=0.3, step_z=0.3, decay=0.99)
    result = bilevel(upper, lower, start, torch.zeros(1, 1, dtype=torch.float64), method=method, max_iterations=600)
    assert float(result.x["a"]) == pytest.approx(3.0, abs=0.05)
    assert float(result.x["b"]) == pytest.approx(0.0, abs=0.05)


def test_a_seed_repeats_the_run() -> None:
    method = BSVRB(step_x=0.01, step_y=0.1, num_sampled=5)
    one, two, other = (Quadratics().run(method, 20, seed=seed).x for seed in (4, 4, 5))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("options", [{"step_x": 0.0}, {"num_sampled": 0}, {"version": 3}, {"alpha": 0.0}, {"beta": 1.5},
                                     {"gamma": -1.0}, {"curvature_floor": 0.0}, {"v_bound": 0.0}, {"step_v": 0.0}])  # fmt: skip
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="BSVRB needs"):
        BSVRB(**{"step_x": 0.1, "step_y": 0.1, "num_sampled": 1, **options})


@pytest.mark.parametrize(
    "options", [{"step_x": -1.0}, {"momentum": 1.0}, {"period": 0}, {"radius": 0.0}, {"decay": 0.0}]
)
def test_settings_of_borep_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="BOREP needs"):
        BOREP(**{"step_x": 0.1, "step_y": 0.1, "step_z": 0.1, **options})


def test_oracles_of_a_wrong_shape_and_too_many_blocks_are_refused() -> None:
    problem, method = Quadratics(), BSVRB(step_x=0.01, step_y=0.1, num_sampled=5)
    whole = lambda x, y, blocks, batch: (y**2).sum()  # noqa: E731
    with pytest.raises(UserError, match="one differentiable value a block"):
        bilevel(problem.upper, whole, problem.x0, problem.y0, method=method, max_iterations=1)
    with pytest.raises(UserError, match="num_sampled of at most the 20 blocks"):
        problem.run(BSVRB(step_x=0.01, step_y=0.1, num_sampled=21), 1)
    with pytest.raises(UserError, match=r"y0 of shape \[blocks"):
        bilevel(problem.upper, problem.lower, problem.x0, torch.zeros(3), method=method, max_iterations=1)


def test_divergence_ends_with_a_status_and_the_best_iterate() -> None:
    problem = Quadratics()
    result = problem.run(BSVRB(step_x=5.0, step_y=50.0, num_sampled=5, version=1, gamma=4.2, alpha=0.1), 2000)
    assert result.status in (Status.DIVERGED, Status.NOT_FINITE)
    assert bool(result.x.isfinite().all())


def test_with_a_gradient_norm_a_tolerance_that_is_not_met_returns_the_nearest_point_seen() -> None:
    """Steps of one length walk past the point where the norm is least; without a norm the last point stands."""
    ends = {}
    for grad_norm in (None, lambda x: abs(float(x) - 0.52)):
        ends[grad_norm is None] = bilevel(
            lambda x, y, *_: x.square().sum() / 2 + y.sum(1), lambda x, y, *_: y.square().sum(1) / 2 + 0 * x.sum(),
            torch.ones(1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64),
            method=BOREP(0.1, 0.1, 0.1, refine_steps=0), max_iterations=7, atol=1e-9, grad_norm=grad_norm,
        )  # fmt: skip
    assert float(ends[False].x) == pytest.approx(0.5)
    assert float(ends[True].x) == pytest.approx(0.3)
    assert not ends[False].success
