"""Learning to Relax, relaxation and conjugate directions: each step against one written from its definition in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, lsq_linear

from trainwright.artifacts import UserError
from trainwright.solvers.linear import (
    OMEGAS,
    ChebCB,
    HeatStream,
    TsallisINF,
    TsallisINFCB,
    optimal_omega,
    solve_dcdm,
    solve_sor,
    solve_ssor_pcg,
    solve_stream,
)
from trainwright.solvers.linear.system import LinearResult
from trainwright.solvers.linear.tsallis_inf import tsallis_weights
from trainwright.solvers.outcome import Status

Array = np.ndarray
COSTS = [31.0, 17.0, 9.0, 26.0]
GRID = [1.0, 1.3, 1.6, 1.9]


def test_the_grid_is_twenty_values_from_1_to_195() -> None:
    assert len(OMEGAS) == 20
    np.testing.assert_allclose(OMEGAS, [1 + 0.05 * i for i in range(20)])


def tsallis_by_hand(losses: Array, rate: float) -> Array:
    """p_i = 4/(η (K_i - x))² with x < min K such that Σ p = 1, by a root finder."""
    total = lambda x: (4 / (rate * (losses - x)) ** 2).sum() - 1  # noqa: E731
    x = brentq(total, losses.min() - 1e6, losses.min() - 1e-9, xtol=1e-13, rtol=1e-15)
    return np.asarray(4 / (rate * (losses - x)) ** 2)


@pytest.mark.parametrize("rate", [2.0, 0.3, 0.02])
def test_tsallis_weights_are_the_roots(rate: float) -> None:
    losses = np.array([3.0, 0.5, 7.0, 0.9])
    np.testing.assert_allclose(tsallis_weights(losses, rate), tsallis_by_hand(losses, rate), rtol=1e-7)


def test_tsallis_inf_takes_the_steps_written_out() -> None:
    """η_t = 2/√t; K_i += (cost - 1)/p_i for the chosen one; losses over the running mean of cost - 1."""
    tuner, random = TsallisINF(GRID, seed=3), np.random.default_rng(3)
    losses, loss_sum = np.zeros(4), 0.0
    for t in range(1, 40):
        scale = loss_sum / (t - 1) if loss_sum > 0 else 1.0
        p = tsallis_by_hand(losses / scale, 2 / math.sqrt(t))
        omega = tuner.suggest()
        np.testing.assert_allclose(tuner.probabilities, p, rtol=1e-6)
        arm = int(random.choice(4, p=tuner.probabilities))
        assert omega == GRID[arm]
        cost = COSTS[arm] + t % 3
        tuner.observe(cost)
        losses[arm] += (cost - 1) / p[arm]
        loss_sum += cost - 1
        np.testing.assert_allclose(tuner.losses, losses, rtol=1e-5)


def test_bins_learn_each_for_itself() -> None:
    """Five equal bins of [-1, 1.5]; beyond the ends the end bins; each with its own rounds, so its own step size."""
    tuner = TsallisINFCB(-1.0, 1.5, num_bins=5, grid=GRID, seed=0)
    lone = [TsallisINF(GRID, seed=0) for _ in range(5)]
    for t, context in enumerate([-1.0, -0.51, -0.49, 0.2, 1.49, 1.5, 9.0, -7.0, 0.2, 0.24, 0.26, -0.49]):
        place = min(max(int((context + 1.0) / 0.5), 0), 4)
        tuner.suggest(context)
        expected = lone[place]._probabilities(context)
        np.testing.assert_allclose(tuner.probabilities, expected, rtol=1e-12)
        arm = int(np.flatnonzero(tuner.grid == tuner.grid[tuner._arm])[0])  # type: ignore[index]
        expected_arm = expected[arm]
        tuner.observe(10.0 + t)
        lone[place].losses[arm] += (9.0 + t) / expected_arm
        lone[place].loss_sum += 9.0 + t
        lone[place].num_rounds += 1
    assert [learner.num_rounds for learner in tuner.learners] == [other.num_rounds for other in lone]
    for learner, other in zip(tuner.learners, lone):
        np.testing.assert_allclose(learner.losses, other.losses, rtol=1e-10)


class HandChebCB:
    """The regression in bounds and the inverse-gap weights, from all data anew in each round."""

    def __init__(self, low: float, high: float, m: int, d: int, margin: float) -> None:
        self.margin, self.bounded = margin, False
        self.low, self.high, self.m, self.d, self.t = low, high, m, d, 0
        self.theta, self.rate = np.zeros((d, m)), 0.0
        self.data: list[tuple[int, Array, float, float]] = []
        self.scale, self.errors = 0.0, 0.0

    def features(self, context: float) -> Array:
        place = 2 * (min(max(context, self.low), self.high) - self.low) / (self.high - self.low) - 1
        return np.polynomial.chebyshev.chebvander(np.array([place]), self.m - 1)[0]

    def probabilities(self, context: float) -> Array:
        y = self.theta @ self.features(context)
        best = int(y.argmin())
        p = 1 / (self.d + self.rate * (y - y[best]))
        p[best] = 1 - (p.sum() - p[best])
        return p

    def squares(self, theta: Array) -> float:
        """The sum of squares that the regression makes small."""
        return sum((float(theta[a] @ f) - loss / self.scale) ** 2 for a, f, loss, _ in self.data)

    def learn(self, arm: int, cost: float, context: float) -> None:
        self.t += 1
        features = self.features(context)
        predicted = float(self.theta[arm] @ features) * max(self.scale, 0.0)
        self.data.append((arm, features, cost - 1, predicted))
        costs = [loss + 1 for _, _, loss, _ in self.data]
        most, spread = max(costs), max(costs) - min(costs)
        bound = 2 + 4 * spread / most * (1 + math.log(self.m))  # N, with (b - a) L the spread and K the most
        new_scale = most * bound
        box = [1 / bound] + [2 * spread / (new_scale * j) for j in range(1, self.m)]
        changed = range(self.d) if new_scale != self.scale else [arm]
        self.theta = self.theta * (self.scale / new_scale)
        self.scale = new_scale
        for place in changed:
            rows = [(f, loss / new_scale) for a, f, loss, _ in self.data if a == place]
            if rows:
                A, b = np.stack([f for f, _ in rows]), np.array([loss for _, loss in rows])
                lifted = np.vstack([A, math.sqrt(1e-9) * np.eye(self.m)])
                ends = self.ends = np.maximum(self.margin * np.array(box), 1e-12)
                self.theta[place] = lsq_linear(
                    lifted, np.concatenate([b, np.zeros(self.m)]), (-ends, ends), method="bvls", tol=1e-15
                ).x
                self.bounded = self.bounded or bool(np.isclose(np.abs(self.theta[place]), ends, rtol=1e-6).any())
        R = sum(((p - loss) / new_scale) ** 2 for _, _, loss, p in self.data)
        left = sum((float(self.theta[a] @ f) - loss / new_scale) ** 2 for a, f, loss, _ in self.data)
        alpha = (math.pi + 2 / math.pi * math.log(2 * self.m + 1)) / (2 * new_scale * (self.m + 1)) * spread
        excess = max(R - left, 0.0) + 2 * alpha**2 * self.t
        self.rate = 2 * self.t * math.sqrt(self.d * self.t / excess) if excess > 0 else 0.0


@pytest.mark.parametrize("margin", [1.0, 0.2])
def test_chebcb_takes_the_steps_written_out(margin: float) -> None:
    tuner = ChebCB(-0.5, 1.0, num_features=3, grid=GRID, seed=1, lipschitz_margin=margin)
    hand, random = HandChebCB(-0.5, 1.0, 3, 4, margin), np.random.default_rng(8)
    for _ in range(30):
        context = float(random.uniform(-0.8, 1.2))
        omega = tuner.suggest(context)
        np.testing.assert_allclose(tuner.probabilities, hand.probabilities(context), rtol=2e-4, atol=1e-7)
        arm = GRID.index(omega)
        cost = 6 + 20 * abs(omega - 1.3 - 0.3 * context) + 12 * max(context, -0.4) ** 2
        tuner.observe(cost)
        hand.learn(arm, cost, context)
        np.testing.assert_allclose(hand.squares(tuner.theta), hand.squares(hand.theta), rtol=1e-5, atol=1e-9)
        if margin == 1.0:
            np.testing.assert_allclose(tuner.theta, hand.theta, rtol=1e-4, atol=2e-6)
        assert bool((np.abs(tuner.theta) <= hand.ends * (1 + 1e-9)).all())
        hand.theta = tuner.theta.copy()  # of the many best ones where data are fewer than features within bounds
        np.testing.assert_allclose(tuner.rate, hand.rate, rtol=1e-3)
    assert tuner.scale == pytest.approx(hand.scale)
    assert hand.bounded or margin == 1.0, "a bound on the coefficients binds"


def fake(statuses: list[tuple[bool, int]]) -> Any:
    """A solver whose ends are given."""
    ends = iter(statuses)

    def solve(A: Any, b: Any, omega: float, *, rtol: float, max_iterations: int) -> LinearResult:
        assert (rtol, max_iterations) == (1e-5, 50)
        ok, nit = next(ends)
        status = Status.CONVERGED if ok else Status.DIVERGED
        return LinearResult(
            x=b, fun=0.0, success=ok, status=status, message="", nit=nit, nfev=nit, residual_norm=0.0, num_matvecs=nit
        )

    return solve


def test_what_a_solve_costs() -> None:
    """Its iterations, one at least; as many as are allowed where it failed, however early."""
    tuner, told = TsallisINF(GRID, seed=0), []
    observe = tuner.observe
    tuner.observe = lambda cost: (told.append(cost), observe(cost))[1]  # type: ignore[method-assign]
    ends = [(True, 12), (False, 3), (True, 0), (False, 50)]
    systems = [(np.eye(2), np.ones(2), 0.0)] * 4
    stream = solve_stream(systems, tuner, solve=fake(ends), rtol=1e-5, max_iterations=50)
    assert stream.costs == told == [12, 50, 1, 50]
    assert stream.num_failed == 2
    assert stream.mean_cost() == pytest.approx(28.25)
    assert stream.mean_cost(last=2) == pytest.approx(25.5)
    assert len(tuner.grid) == len(GRID)


def system(n: int = 7) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(4)
    root = random.normal(size=(n, n))
    return root @ root.T + n * np.eye(n) / 2, random.normal(size=n), random.normal(size=n) + 1


def iterates(solve: Any, num: int, **options: Any) -> list[Array]:
    seen: list[Array] = []
    solve(
        rtol=0.0,
        max_iterations=num,
        callback=lambda moment: seen.append(np.asarray(moment.state.x)) or False,
        **options,
    )
    return seen


def test_sor_takes_the_steps_written_out() -> None:
    """x ← x + (D/ω + L)⁻¹ (b - A x), row by row."""
    A, b, x = system()
    found = iterates(lambda **o: solve_sor(A, b, 1.4, x, **o), 5)
    for k in range(5):
        x = x.copy()
        for i in range(len(b)):
            x[i] += 1.4 * (b[i] - A[i] @ x) / A[i, i]
        np.testing.assert_allclose(found[k + 1], x, rtol=1e-11)


def test_ssor_pcg_takes_the_steps_written_out() -> None:
    """Conjugate gradients with M = (D + ωL) D⁻¹ (D + ωL)'/(ω(2 - ω)) made dense."""
    A, b, x = system()
    omega, D, L = 1.3, np.diag(np.diag(A)), np.tril(A, -1)
    M = (D + omega * L) @ np.linalg.inv(D) @ (D + omega * L).T / (omega * (2 - omega))
    found = iterates(lambda **o: solve_ssor_pcg(A, b, omega, x, **o), 5)
    r = b - A @ x
    z = np.linalg.solve(M, r)
    p = z
    for k in range(5):
        length = (r @ z) / (p @ A @ p)
        x, new = x + length * p, r - length * A @ p
        new_z = np.linalg.solve(M, new)
        p = new_z + (new @ new_z) / (r @ z) * p
        r, z = new, new_z
        np.testing.assert_allclose(found[k + 1], x, rtol=1e-9)


@pytest.mark.parametrize("num_previous", [0, 1, 2])
def test_dcdm_takes_the_steps_written_out(num_previous: int) -> None:
    """Directions of a linear map of r/‖r‖, A-orthogonal to the last ones; steps by exact line search."""
    A, b, x = system()
    map_ = np.random.default_rng(6).normal(size=A.shape) + 3 * np.eye(len(b))
    model = lambda r: torch.from_numpy(map_) @ r + 0.05  # noqa: E731
    found = iterates(lambda **o: solve_dcdm(A, b, model, x, num_previous=num_previous, **o), 5)
    previous: list[Array] = []
    for k in range(5):
        r = b - A @ x
        d = map_ @ (r / np.linalg.norm(r)) + 0.05
        for p in previous:
            d = d - p * (d @ A @ p) / (p @ A @ p)
        x = x + d * (d @ r) / (d @ A @ d)
        previous = [d, *previous][:num_previous]
        np.testing.assert_allclose(found[k + 1], x, rtol=1e-9)


def test_youngs_omega() -> None:
    beta = 0.9
    assert optimal_omega(beta) == pytest.approx(2 / (1 + math.sqrt(1 - beta**2)), rel=1e-12)


def test_exploration_ends_sooner_with_more_growth() -> None:
    """η_t = 2 t^growth √(…): the theory's 0 explores t times as long as the code's 1."""
    rates = {}
    for growth in (0.0, 1.0):
        tuner = ChebCB(-1.0, 1.0, num_features=2, grid=GRID, seed=0, growth=growth)
        for t in range(6):
            tuner.suggest(0.1 * t)
            tuner._arm = t % 4
            tuner.observe(10.0 + 3 * (t % 4))
        rates[growth] = tuner.rate
    assert rates[1.0] == pytest.approx(6 * rates[0.0])


def test_the_heat_stream_is_crank_and_nicolson_written_out() -> None:
    """Dense matrices of the 5-point Laplacian times (side + 1)², κ at the middle of each step, solutions handed on."""
    heat = HeatStream(side=4, num_steps=8, end=1.0, seed=2)
    line = 2 * np.eye(4) - np.eye(4, k=1) - np.eye(4, k=-1)
    L = 25 * (np.kron(line, np.eye(4)) + np.kron(np.eye(4), line))
    u, contexts = heat.u.copy(), []
    for k, (matrix, right, context) in enumerate(heat):
        wave = math.sin(2 * math.pi * (k + 0.5) / 8)
        kappa = 0.1 * wave if wave > 0 else -10 * wave
        half = kappa / 8 / 2 * L
        np.testing.assert_allclose(matrix.toarray(), np.eye(16) + half, rtol=1e-12)
        np.testing.assert_allclose(right, u - half @ u, rtol=1e-9, atol=1e-12)
        assert context == pytest.approx(math.log10(1 + kappa / 8 * 25))
        u = np.linalg.solve(np.eye(16) + half, right)
        heat.take(solve_ssor_pcg(matrix, right, 1.1, rtol=1e-13))
        contexts.append(context)
    assert 0 < min(contexts) < max(contexts) <= heat.highest_context
    assert len(heat) == 8
    with pytest.raises(UserError, match="side of at least 2"):
        HeatStream(side=1)


@pytest.mark.slow
def test_on_the_heat_stream_what_is_learned_beats_the_best_fixed_omega() -> None:
    """SSOR-PCG, two periods of 600 steps: iterations over the last against those of each ω of the grid, and of plain CG."""
    fixed = {}
    for omega in OMEGAS:
        heat = HeatStream(side=25, num_steps=1200, end=2.0)
        fixed[omega] = solve_stream(heat, TsallisINF([omega]), solve=solve_sor, on_result=heat.take).mean_cost(600)
    heat = HeatStream(side=25, num_steps=1200, end=2.0)
    tuner = ChebCB(0.0, heat.highest_context)
    learned = solve_stream(heat, tuner, solve=solve_sor, on_result=heat.take).mean_cost(600)
    assert learned < min(fixed.values())
