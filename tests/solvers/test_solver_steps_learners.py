"""Gradient descent's online forms, and the policies' baseline, against steps and fits written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import torch

from trainwright.artifacts import UserError
from trainwright.solvers.online import (
    OGD,
    AdaGradNorm,
    Ball,
    Box,
    DynamicOMD,
    ExpConcaveOMD,
    OptimisticFTRL,
    OptimisticOMD,
    Simplex,
    play,
)
from trainwright.solvers.online.descent import descend
from trainwright.solvers.policy import LinearBaseline, Trajectories
from trainwright.solvers.policy.estimators import Estimator

BALL = Ball(torch.tensor([0.5, -1.0], dtype=torch.float64), radius=0.8)
GRADIENTS = torch.tensor([[0.6, -0.3], [0.1, 0.9], [-0.8, 0.2], [0.3, 0.3]], dtype=torch.float64)


def test_descent_takes_the_steps_written_out() -> None:
    """D/(G √t) for convex losses, 1/(μ t) for strongly convex ones, D/√(2 Σ ‖g‖²) where no bound is known."""
    plain, strong, adaptive = OGD(BALL, gradient_bound=1.0), OGD(BALL, strong_convexity=2.5), AdaGradNorm(BALL)
    plays = [BALL.centre] * 3
    squares = 0.0
    for t, gradient in enumerate(GRADIENTS, start=1):
        squares += float(gradient @ gradient)
        steps = (1.6 / math.sqrt(t), 1 / (2.5 * t), 1.6 / math.sqrt(2 * squares))
        for i, learner in enumerate((plain, strong, adaptive)):
            torch.testing.assert_close(learner.predict(), plays[i])
            learner.update(gradient)
            plays[i] = BALL.project(plays[i] - steps[i] * gradient)


def test_the_average_play_is_the_mean_of_what_was_played() -> None:
    seen: list[torch.Tensor] = []

    def environment(num: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(at)
        return at @ GRADIENTS[num], GRADIENTS[num]

    result = play(OGD(BALL, gradient_bound=1.0), environment, max_iterations=4)
    torch.testing.assert_close(result.average, torch.stack(seen).mean(0))
    assert result.fun == pytest.approx(float(sum(at @ gradient for at, gradient in zip(seen, GRADIENTS))) / 4)


def test_the_experts_steps_are_the_grid_that_the_theory_writes() -> None:
    """From D/(G √(8T)), doubled until 1/(8L) is reached."""
    diameter, bound, smoothness, rounds = 1.6, 2.0, 0.125, 50
    learner = DynamicOMD(BALL, gradient_bound=bound, smoothness=smoothness, num_rounds=rounds)
    lowest = diameter / (bound * math.sqrt(8 * rounds))
    wanted = [lowest]
    while wanted[-1] < 1 / (8 * smoothness):
        wanted.append(2 * wanted[-1])
    assert learner.steps.flatten().tolist() == pytest.approx(wanted)
    assert len(wanted) == 6


@pytest.mark.parametrize(
    "make",
    [
        lambda: OGD(BALL, gradient_bound=1.0),
        lambda: OptimisticOMD(BALL, gradient_bound=1.0),
        lambda: OptimisticFTRL(BALL, gradient_bound=1.0),
        lambda: ExpConcaveOMD(BALL, gradient_bound=1.0, exp_concavity=1.0),
        lambda: DynamicOMD(BALL, gradient_bound=1.0, smoothness=1.0, num_rounds=9),
    ],
)
def test_a_gradient_above_the_stated_bound_is_refused_and_changes_nothing(make: object) -> None:
    learner = make()  # type: ignore[operator]
    learner.predict()
    learner.update(torch.tensor([0.6, 0.8], dtype=torch.float64))
    before = learner.predict()
    with pytest.raises(UserError, match=r"at most gradient_bound = 1 in norm are needed; got one of 1.0198"):
        learner.update(torch.tensor([0.2, -1.0], dtype=torch.float64))
    assert torch.equal(learner.predict(), before)
    assert learner.num_rounds == 1


def test_the_baseline_is_the_ridge_fit_of_rewards_to_go() -> None:
    random = np.random.default_rng(0)
    time, owner = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 0, 1, 1])
    seen, rewards = torch.from_numpy(random.normal(size=(5, 2))), torch.from_numpy(random.normal(size=5) + 2)
    steps = Trajectories(seen, torch.zeros(5), rewards, owner, time, num=2)
    baseline = LinearBaseline(discount=0.8, ridge=1e-3)
    baseline.fit(steps)
    r, s, h = rewards.numpy(), seen.numpy(), time.numpy() / 100
    wanted = [r[0] + 0.8 * r[1] + 0.64 * r[2], r[1] + 0.8 * r[2], r[2], r[3] + 0.8 * r[4], r[4]]
    features = np.column_stack([s, s**2, h, h**2, h**3, np.ones(5)])
    gram = features.T @ features
    weights = np.linalg.solve(gram + 1e-3 * np.diag(gram).mean() * np.eye(len(gram)), features.T @ np.array(wanted))
    np.testing.assert_allclose(baseline(steps).numpy(), features @ weights, rtol=1e-8)


def test_accelerated_descent_restarts_where_the_way_goes_uphill() -> None:
    """FISTA written out with the restart of O'Donoghue and Candès, on a quadratic that makes it restart."""
    scales, x = np.array([1.0, 0.03, 0.004]), np.array([1.0, -2.0, 3.0])
    ahead, momentum, restarts = x.copy(), 1.0, 0
    for _ in range(60):
        new = ahead - scales * ahead
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        weight = (momentum - 1) / following
        if (ahead - new) @ (new - x) > 0:
            weight, following, restarts = 0.0, 1.0, restarts + 1
        momentum, ahead, x = following, new + weight * (new - x), new
    slopes = torch.from_numpy(scales)
    found = descend(lambda at: slopes * at, lambda at: at, torch.tensor([1.0, -2.0, 3.0]).double(), 1.0, 0.0, 60)
    assert restarts > 0
    np.testing.assert_allclose(found.numpy(), x, rtol=1e-10, atol=1e-14)


def test_the_diameter_of_a_simplex_is_the_distance_of_two_corners() -> None:
    corners = 3.0 * torch.eye(4, dtype=torch.float64)
    assert Simplex(4, total=3.0).diameter == pytest.approx(float((corners[0] - corners[1]).norm()))


@pytest.mark.parametrize("seed", range(4))
def test_projections_in_a_metric_onto_a_simplex_are_the_best_of_all_faces(seed: int) -> None:
    """In metrics of condition 1e8, held against the least distance over the faces, each by its own linear system."""
    random = np.random.default_rng(seed)
    turn = np.linalg.qr(random.normal(size=(4, 4)))[0]
    metric, x = turn @ np.diag([1e-4, 1e-1, 10.0, 1e4]) @ turn.T, random.normal(size=4)
    best = min(_on_faces(metric, x), key=lambda point: float((point - x) @ metric @ (point - x)))
    found = Simplex(4).project_in(torch.from_numpy(metric), torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), best, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_projections_in_a_metric_onto_a_box_are_as_good_as_least_squares_within_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    turn = np.linalg.qr(random.normal(size=(5, 5)))[0]
    root, x = np.diag([1e-2, 0.1, 1.0, 30.0, 100.0]) @ turn.T, 2 * random.normal(size=5)
    low, high = -random.random(5), random.random(5)
    wanted = scipy.optimize.lsq_linear(root, root @ x, (low, high), method="bvls", tol=1e-15).x
    box = Box(torch.from_numpy(low), torch.from_numpy(high))
    found = box.project_in(torch.from_numpy(root.T @ root), torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-7)


def _on_faces(metric: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
    """The feasible minimisers of ½ (z − x)ᵀ M (z − x) with Σ z = 1 and z = 0 but for some entries."""
    found = []
    for size in range(1, 5):
        for free in map(list, itertools.combinations(range(4), size)):
            system = np.block([[metric[np.ix_(free, free)], np.ones((size, 1))], [np.ones((1, size)), 0.0]])
            point = np.zeros(4)
            point[free] = np.linalg.solve(system, [*(metric @ x)[free], 1.0])[:size]
            found += [point] if point.min() >= -1e-12 else []
    return found


def test_advantages_take_the_baseline_at_the_discount_of_their_time() -> None:
    """γᵗ (Gₜ − b(sₜ)) with Gₜ from time t on: what multiplies a score in the estimate of the gradient."""
    time, owner = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 1])
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    steps = Trajectories(torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4), rewards, owner, time, num=2)
    oracle = Estimator(
        None, torch.nn.Linear(1, 1), batch_size=2, horizon=3, discount=0.5, generator=torch.Generator(),
        baseline=lambda at: torch.full_like(at.rewards, 3.0),
    )  # fmt: skip
    wanted = torch.tensor([3.0 - 3.0, 0.5 * (4.0 - 3.0), 0.25 * (4.0 - 3.0), 8.0 - 3.0], dtype=torch.float64)
    torch.testing.assert_close(oracle._weights(steps), wanted)
