"""Online learners against rounds written out, variational inequalities of their projections, and the theory's regrets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainwright.artifacts import UserError
from trainwright.solvers.online import (
    OGD,
    AdaGradNorm,
    Ball,
    Box,
    ConvexSet,
    DynamicOMD,
    ExpConcaveOMD,
    Learner,
    OptimisticFTL,
    OptimisticFTRL,
    OptimisticOMD,
    Simplex,
    best_in_hindsight,
    play,
)
from trainwright.solvers.outcome import Status

NUM_DIMS, NUM_SEEDS, BOUND = 5, 3, 3.0
BALL = Ball(NUM_DIMS)
SETS: list[ConvexSet] = [
    Ball(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), radius=0.7),
    Box(torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 3.0, 2.5], dtype=torch.float64)),
    Simplex(3, total=2.0),
]
Make = Callable[[int], Learner]


def bounded(*shape: int) -> Tensor:
    """Gradients whose largest norm is 2."""
    found = normal(*shape)
    return 2 * found / found.norm(dim=-1).max()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("feasible", SETS)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 30.0))
def test_projections_satisfy_their_variational_inequality(feasible: ConvexSet, seed: int, scale: float) -> None:
    """p = Π(x) is characterised by ⟨H (x − p), z − p⟩ ≤ 0 for all z of the set."""
    outside = feasible.centre + scale * normal(4, 3, seed=seed)
    others = feasible.project(feasible.centre + 5 * normal(50, 1, 3, seed=seed + 1))
    factor = normal(4, 3, 3, seed=seed + 2)
    metric = factor @ factor.mT + 0.05 * torch.eye(3, dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64).expand(4, 3, 3)
    for matrix, point in ((eye, feasible.project(outside)), (metric, feasible.project_in(metric, outside))):
        torch.testing.assert_close(feasible.project(point), point, rtol=0, atol=1e-12)
        pull = (matrix @ (outside - point).unsqueeze(-1)).squeeze(-1)
        assert ((pull * (others - point)).sum(-1) <= 1e-7 * (1 + scale) * matrix.norm()).all()
    torch.testing.assert_close(feasible.project(others), others, rtol=0, atol=1e-12)
    assert (others - others.flip(0)).norm(dim=-1).max() <= feasible.diameter + 1e-9


@pytest.mark.parametrize("feasible", SETS)
def test_optimistic_descent_is_the_one_written_out(feasible: ConvexSet) -> None:
    learner = OptimisticOMD(feasible, gradient_bound=2.0, delta=0.5)
    gradients = bounded(6, 3)
    auxiliary, hint, surprise = feasible.centre, torch.zeros(3, dtype=torch.float64), 0.0
    for gradient in gradients:
        step = feasible.diameter / math.sqrt(0.5 + 16 + surprise)
        torch.testing.assert_close(learner.predict(), feasible.project(auxiliary - step * hint))
        learner.update(gradient)
        auxiliary = feasible.project(auxiliary - step * gradient)
        surprise, hint = surprise + float((gradient - hint) @ (gradient - hint)), gradient


@pytest.mark.parametrize("feasible", SETS)
def test_regularised_leader_is_the_one_written_out(feasible: ConvexSet) -> None:
    learner = OptimisticFTRL(feasible, gradient_bound=2.0, smoothness=0.5)
    gradients, diameter = bounded(6, 3), feasible.diameter
    weighted = 0.0
    hints = torch.cat([torch.zeros(1, 3, dtype=torch.float64), gradients[:-1]])
    for t in range(6):
        step = diameter**2 / (0.5 * diameter**2 + 2 * diameter + weighted)
        target = gradients[:t].sum(0) + hints[t]
        torch.testing.assert_close(learner.predict(), feasible.project(feasible.centre - step / 2 * target))
        learner.update(gradients[t])
        weighted += step * float((gradients[t] - hints[t]).square().sum())


def test_strongly_convex_learners_are_the_ones_written_out() -> None:
    feasible, gradients = SETS[0], normal(5, 3)
    leader, descent = OptimisticFTL(feasible, strong_convexity=0.8), OptimisticOMD(feasible, strong_convexity=0.8)
    plays: list[Tensor] = []
    auxiliary, hint = feasible.centre, torch.zeros(3, dtype=torch.float64)
    for t in range(5):
        if t > 0:
            numerator = 0.8 * torch.stack(plays).sum(0) - gradients[:t].sum(0) - gradients[t - 1]
            torch.testing.assert_close(leader.predict(), feasible.project(numerator / (0.8 * t)))
        plays.append(leader.predict())
        leader.update(gradients[t])
        step = 2 / (0.8 * (t + 1))
        torch.testing.assert_close(descent.predict(), feasible.project(auxiliary - step * hint))
        descent.update(gradients[t])
        auxiliary, hint = feasible.project(auxiliary - step * gradients[t]), gradients[t]
    torch.testing.assert_close(plays[0], feasible.centre)


def test_exp_concave_learner_is_the_one_written_out() -> None:
    feasible, gradients = SETS[0], 0.5 * normal(6, 3)
    learner = ExpConcaveOMD(feasible, gradient_bound=2.0, exp_concavity=0.3)
    beta = 0.5 * min(1 / (4 * 2.0 * 1.4), 0.3)
    metric = torch.eye(3, dtype=torch.float64) * (1 + beta / 2 * 4)
    auxiliary, hint = feasible.centre, torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        wanted = feasible.project_in(metric, auxiliary - torch.linalg.solve(metric, hint))
        torch.testing.assert_close(learner.predict(), wanted)
        learner.update(gradient)
        auxiliary = feasible.project_in(metric, auxiliary - torch.linalg.solve(metric, gradient))
        metric, hint = metric + beta / 2 * torch.outer(gradient, gradient), gradient
    torch.testing.assert_close(learner.inverse @ learner.metric, torch.eye(3, dtype=torch.float64))


def test_with_one_step_size_the_mixture_is_that_expert() -> None:
    feasible, gradients = SETS[1], bounded(6, 3)
    learner = DynamicOMD(feasible, gradient_bound=2.0, smoothness=1.0, num_rounds=10, smallest_step=0.2)
    assert learner.num_experts == 1
    auxiliary, hint = feasible.centre, torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        torch.testing.assert_close(learner.predict(), feasible.project(auxiliary - 0.2 * hint))
        learner.update(gradient)
        auxiliary, hint = feasible.project(auxiliary - 0.2 * gradient), gradient


def test_the_mixture_weighs_its_experts_as_written_out() -> None:
    feasible, gradients = SETS[0], bounded(5, 3)
    learner = DynamicOMD(feasible, gradient_bound=2.0, smoothness=1.0, num_rounds=100, smallest_step=0.05)
    steps = [0.05, 0.1, 0.2]
    auxiliary, before = [feasible.centre] * 3, [feasible.centre] * 3
    losses, surprise, hint = [0.0] * 3, 0.0, torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        plays = [feasible.project(auxiliary[i] - steps[i] * hint) for i in range(3)]
        moved = [2.0 * float((plays[i] - before[i]).square().sum()) for i in range(3)]
        rate = math.sqrt(math.log(3)) / (1.4 * math.sqrt(4 + surprise))
        weights = [math.exp(-rate * (losses[i] + float(hint @ plays[i]) + moved[i])) for i in range(3)]
        wanted = torch.stack([weight / sum(weights) * x for weight, x in zip(weights, plays)]).sum(0)
        torch.testing.assert_close(learner.predict(), wanted)
        learner.update(gradient)
        losses = [losses[i] + float(gradient @ plays[i]) + moved[i] for i in range(3)]
        auxiliary = [feasible.project(auxiliary[i] - steps[i] * gradient) for i in range(3)]
        surprise, before, hint = surprise + float((gradient - hint).square().sum()), plays, gradient


def regret(make: Make, num_rounds: int, noise: float, num_flips: int = 0, convexity: float = 0.0) -> float:
    """Mean regret of (x − mₜ)'A(x − mₜ)/2 with noisy gradients on the unit ball, over three seeds; m flips its sign."""
    scales = torch.linspace(convexity, 1, NUM_DIMS, dtype=torch.float64)
    means = 0.8 * torch.nn.functional.normalize(normal(NUM_SEEDS, NUM_DIMS), dim=-1)
    noises = noise / NUM_DIMS**0.5 * normal(num_rounds, NUM_SEEDS, NUM_DIMS, seed=1)

    def environment(t: int, x: Tensor) -> tuple[Tensor, Tensor]:
        offset = x - means * (-1) ** (t * (num_flips + 1) // num_rounds)
        return (scales * offset**2).sum(-1) / 2, scales * offset + noises[t]

    comparator = torch.zeros(NUM_DIMS) if num_flips else means
    return float(play(make(num_rounds), environment, max_iterations=num_rounds, comparator=comparator).regret.mean())


def omd(num_rounds: int) -> Learner:
    return OptimisticOMD(BALL, gradient_bound=BOUND, batch_shape=(NUM_SEEDS,))


def ftrl(num_rounds: int) -> Learner:
    return OptimisticFTRL(BALL, gradient_bound=BOUND, smoothness=1.0, batch_shape=(NUM_SEEDS,))


def ogd(num_rounds: int) -> Learner:
    return OGD(BALL, gradient_bound=BOUND, batch_shape=(NUM_SEEDS,))


def dynamic(num_rounds: int) -> Learner:
    return DynamicOMD(BALL, gradient_bound=BOUND, smoothness=1.0, num_rounds=num_rounds, batch_shape=(NUM_SEEDS,))


def proven_bound(num_rounds: int, noise: float) -> float:
    """The regularised leader's: D (6 σ̄ + 3√2 Σ̄) √T + (3√2/2) D G + ν + (4 D²G² + 9 L²D⁴)/ν, with L = 1, D = 2."""
    diameter, drift = 2.0, BOUND / math.sqrt(num_rounds)  # the first round counts as a drift from 0
    nu = diameter**2 + diameter * BOUND
    leading = diameter * (6 * noise + 3 * math.sqrt(2) * drift) * math.sqrt(num_rounds)
    rest = (4 * diameter**2 * BOUND**2 + 9 * diameter**4) / nu
    return leading + 1.5 * math.sqrt(2) * diameter * BOUND + nu + rest


@pytest.mark.parametrize("make", [omd, ftrl])
def test_without_noise_the_regret_does_not_grow(make: Make) -> None:
    short, long = regret(make, 300, noise=0.0), regret(make, 1200, noise=0.0)
    assert long == pytest.approx(short, rel=1e-3)
    assert 0 < long < 1


@pytest.mark.parametrize("make", [omd, ftrl])
def test_in_noise_the_regret_grows_with_the_root(make: Make) -> None:
    short, long = regret(make, 500, noise=0.5), regret(make, 2000, noise=0.5)
    assert 1.5 < long / short < 2.5
    assert long < proven_bound(2000, noise=0.5)


@pytest.mark.slow  # 20,000 steps; the tests above play fewer
def test_against_drift_optimism_wins() -> None:
    plain = regret(ogd, 2000, noise=0.0, num_flips=20)
    assert plain < 0
    for make in (omd, ftrl):
        assert regret(make, 2000, noise=0.0, num_flips=20) < 1.25 * plain


@pytest.mark.slow  # 10,000 steps
def test_strong_convexity_gives_logarithmic_regret() -> None:
    for kind in (OptimisticOMD, OptimisticFTL):
        make: Make = lambda _: kind(BALL, strong_convexity=0.5, batch_shape=(NUM_SEEDS,))  # noqa: E731, B023
        first, second, third = (regret(make, num, noise=0.5, convexity=0.5) for num in (250, 1000, 4000))
        assert 0 < third < 6
        assert third - second < 2 * (second - first) + 0.2
        assert third / first < 1.8


def test_exp_concave_regret_of_portfolios() -> None:
    """Log-wealth of two assets, the better one changing by chance: against the best constant portfolio."""
    num_rounds = 300
    draws = torch.rand(num_rounds, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    returns = 0.6 + 0.8 * draws + torch.tensor([0.05, 0.0], dtype=torch.float64)

    def environment(t: int, x: Tensor) -> tuple[Tensor, Tensor]:
        wealth = returns[t] @ x
        return -wealth.log(), -returns[t] / wealth

    best = best_in_hindsight(lambda x: -(returns / (returns @ x).unsqueeze(-1)).sum(0), Simplex(2), smoothness=3e3)
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)
    wealth = (returns @ torch.stack([grid, 1 - grid])).log().sum(0)
    assert float((returns @ best).log().sum()) == pytest.approx(float(wealth.max()), abs=1e-4)
    learner = ExpConcaveOMD(Simplex(2), gradient_bound=2.5, exp_concavity=1.0, beta=0.25)
    assert -1 < float(play(learner, environment, max_iterations=num_rounds, comparator=best).regret) < 2


def test_exp_concave_regret_is_flat_without_noise_and_bounded_in_it() -> None:
    """Squared losses (w·a − b)²/2 with |w·a − b| ≤ 2 are 1/4-exp-concave; the online Newton bound is 5 (4 + G D) d log T."""
    target = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64)
    inputs = torch.nn.functional.normalize(normal(1200, 3), dim=-1)

    def regrets(noise: float) -> Tensor:
        outputs = inputs @ target + noise * (2 * (normal(1200, seed=1) > 0) - 1)

        def environment(t: int, x: Tensor) -> tuple[Tensor, Tensor]:
            error = inputs[t] @ x - outputs[t]
            return error**2 / 2, error * inputs[t]

        learner = ExpConcaveOMD(Ball(3), gradient_bound=2.0, exp_concavity=0.25)
        found = play(learner, environment, max_iterations=1200, comparator=target).regrets
        assert found is not None
        return found

    quiet, noisy = regrets(0.0), regrets(0.4)
    assert float(quiet[-1]) < 1.05 * float(quiet[400])
    assert 0 < float(noisy[-1]) < 5 * (4 + 4) * 3 * math.log(1200)


@pytest.mark.slow  # thousands of rounds
def test_dynamic_regret_is_near_that_of_the_best_step_size() -> None:
    """Targets that jump often or seldom: one fixed step size cannot serve both, the mixture is near the better one."""
    num_rounds = 1200

    def dynamic_regret(make: Make, num_jumps: int, noise: float) -> float:
        targets = 0.8 * torch.nn.functional.normalize(normal(num_jumps, NUM_DIMS, seed=5), dim=-1)
        noises = noise / NUM_DIMS**0.5 * normal(num_rounds, NUM_SEEDS, NUM_DIMS, seed=6)
        noises = noises * (1.2 / noises.norm(dim=-1, keepdim=True)).clamp_max(1.0)  # so that the bound holds

        def target(t: int) -> Tensor:
            return targets[t * num_jumps // num_rounds]

        def environment(t: int, x: Tensor) -> tuple[Tensor, Tensor]:
            return (x - target(t)).square().sum(-1) / 2, x - target(t) + noises[t]

        return float(play(make(num_rounds), environment, max_iterations=num_rounds, comparator=target).regret.mean())

    def one(step: float) -> Make:
        options: dict[str, Any] = {"gradient_bound": BOUND, "smoothness": 1.0, "batch_shape": (NUM_SEEDS,)}
        return lambda num: _Single(BALL, num_rounds=num, smallest_step=step, **options)

    for num_jumps, noise in ((1, 2.0), (40, 0.5)):
        mixture = dynamic_regret(dynamic, num_jumps, noise)
        singles = [dynamic_regret(one(step), num_jumps, noise) for step in (0.007, 0.12)]
        assert mixture < 1.35 * min(singles)
        assert max(singles) > 1.5 * min(singles)


class _Single(DynamicOMD):
    """A mixture of one expert."""

    def __init__(self, feasible: ConvexSet, **options: Any) -> None:
        super().__init__(feasible, **options)
        self.num_experts, self.steps = 1, self.steps[:1]
        self.auxiliary, self.experts = self.auxiliary[..., :1, :], self.experts[..., :1, :]
        self.losses = self.losses[..., :1]


def test_a_batch_is_independent_players() -> None:
    gradients = bounded(8, 2, 3)
    gradients[:, 0] /= 3
    makes: list[Callable[[tuple[int, ...]], Learner]] = [
        lambda shape: OptimisticOMD(SETS[0], gradient_bound=2.0, batch_shape=shape),
        lambda shape: OptimisticFTRL(SETS[1], gradient_bound=2.0, batch_shape=shape),
        lambda shape: OptimisticFTL(SETS[2], strong_convexity=1.0, batch_shape=shape),
        lambda shape: ExpConcaveOMD(SETS[0], gradient_bound=2.0, exp_concavity=1.0, batch_shape=shape),
        lambda shape: DynamicOMD(SETS[0], gradient_bound=2.0, smoothness=1.0, num_rounds=99, batch_shape=shape),
        lambda shape: OGD(SETS[0], strong_convexity=2.0, batch_shape=shape),
        lambda shape: AdaGradNorm(SETS[0], batch_shape=shape),
    ]
    for make in makes:
        both, single = make((2,)), make(())
        for gradient in gradients:
            torch.testing.assert_close(both.predict()[1], single.predict())
            both.update(gradient)
            single.update(gradient[1])


def test_a_true_hint_is_used_and_a_float32_set_stays_float32() -> None:
    feasible = Ball(torch.zeros(3))
    knowing, guessing = (OptimisticOMD(feasible, gradient_bound=1.0) for _ in range(2))
    gradient = torch.tensor([1.0, 0.0, 0.0])
    assert torch.equal(knowing.predict(), torch.zeros(3))
    assert knowing.predict(hint=gradient)[0] < -0.4
    knowing.update(gradient)
    guessing.predict()
    guessing.update(gradient)
    assert (float(knowing.surprise), float(guessing.surprise)) == (0.0, 1.0)
    assert knowing.predict().dtype == torch.float32
    assert knowing.surprise.dtype == torch.float64


def test_a_round_that_is_not_finite_ends_the_run() -> None:
    learner = OGD(BALL, gradient_bound=3.0)

    def environment(t: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(), torch.ones_like(x) * (torch.nan if t == 3 else 1.0)

    result = play(learner, environment, max_iterations=10)
    assert (result.status, result.nit, result.nfev, learner.num_rounds) == (Status.NOT_FINITE, 3, 3, 3)
    assert result.losses.shape == (3,)
    with pytest.raises(UserError, match="comparator is needed"):
        _ = result.regret
    stopped = play(
        learner,
        lambda t, x: (x.sum(), x),
        max_iterations=10,
        callback=lambda moment: moment.nit == 4,
        keep_history=True,
    )
    assert (stopped.status, stopped.nit, len(stopped.history["fun"])) == (Status.STOPPED, 4, 5)


def test_mistakes_are_named() -> None:
    learner = OGD(BALL, gradient_bound=1.0)
    with pytest.raises(UserError, match="predict\\(\\) is needed"):
        learner.update(torch.zeros(5))
    learner.predict()
    for gradient, message in ((torch.zeros(4), "shape \\(4,\\)"), (torch.full((5,), torch.nan), "NaN or infinity")):
        with pytest.raises(UserError, match=message):
            learner.update(gradient)
    assert learner.num_rounds == 0
    with pytest.raises(UserError, match="one of them"):
        OptimisticOMD(BALL)
    with pytest.raises(UserError, match="positive strong_convexity"):
        OGD(BALL, strong_convexity=-1.0)
    with pytest.raises(UserError, match="positive gradient_bound"):
        OptimisticFTRL(BALL, gradient_bound=0.0)
    with pytest.raises(UserError, match="positive radius"):
        Ball(2, radius=0.0)
    with pytest.raises(UserError, match="finite centre"):
        Ball(0)
    with pytest.raises(UserError, match="finite low < high"):
        Box(torch.ones(2), torch.zeros(2))
    with pytest.raises(UserError, match="at least 2 dimensions"):
        Simplex(1)
    with pytest.raises(UserError, match="max_iterations of at least 1"):
        play(learner, lambda t, x: (x.sum(), x), max_iterations=0)
