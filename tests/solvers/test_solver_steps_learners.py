"""Gradient descent's online forms, and the policies' baseline, against steps and fits written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainwright.artifacts import UserError
from trainwright.solvers.online import (
    OGD,
    AdaGradNorm,
    Ball,
    DynamicOMD,
    ExpConcaveOMD,
    OptimisticFTRL,
    OptimisticOMD,
    play,
)
from trainwright.solvers.policy import LinearBaseline, Trajectories

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
