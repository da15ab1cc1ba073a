"""AI-SQP's step against one written from its definition in NumPy: Ψ, δ, θ, the shift, the penalties, the line search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import linalg

from trainwright.solvers.constrained import NumpyProblem, SqpOptions
from trainwright.solvers.constrained.ai_sqp import _AiSqp
from trainwright.solvers.constrained.problem import SlackProblem
from trainwright.solvers.constrained.sketch import SketchedSystem

Array = np.ndarray
N, M = 5, 2
Q = np.diag([3.0, -1.0, 0.5, 2.0, -2.0])
P = np.array([0.3, -0.7, 1.1, 0.2, -0.4])


def fun(x: Array) -> float:
    return float((x**4).sum() / 4 + x @ Q @ x / 2 + P @ x)


def grad(x: Array) -> Array:
    return x**3 + Q @ x + P


def constraints(x: Array) -> Array:
    return np.array([x @ x - 3.0, np.sin(x[0]) + x[1] * x[2] - 0.5])


def jacobian(x: Array) -> Array:
    return np.stack([2 * x, np.array([np.cos(x[0]), x[2], x[1], 0.0, 0.0])])


def hessian(x: Array, multipliers: Array) -> Array:
    second = np.zeros((N, N))
    second[0, 0], second[1, 2], second[2, 1] = -np.sin(x[0]), 1.0, 1.0
    return np.diag(3 * x**2) + Q + multipliers[0] * 2 * np.eye(N) + multipliers[1] * second


class Hand:
    """x, λ, η₁, η₂, δ, and one step from them."""

    def __init__(self, x: Array, multipliers: Array, options: SqpOptions) -> None:
        self.x, self.multipliers, self.o = x, multipliers, options
        self.eta1, self.eta2, self.delta = options.eta1, options.eta2, options.delta
        self.first = float(np.linalg.norm(self.kkt()))
        self.tolerances: list[float] = []
        self.seen: set[str] = set()

    def kkt(self) -> Array:
        return np.concatenate([grad(self.x) + jacobian(self.x).T @ self.multipliers, constraints(self.x)])

    def merit(self, x: Array, multipliers: Array) -> float:
        gx, c = grad(x) + jacobian(x).T @ multipliers, constraints(x)
        return fun(x) + multipliers @ c + self.eta1 / 2 * (c @ c) + self.eta2 / 2 * (gx @ gx)

    def slope(self, z: Array) -> float:
        G, H = jacobian(self.x), hessian(self.x, self.multipliers)
        gx, c = self.kkt()[:N], constraints(self.x)
        first = gx + self.eta2 * H @ gx + self.eta1 * G.T @ c
        return float(first @ z[:N] + (c + self.eta2 * G @ gx) @ z[N:])

    def trial_delta(self, psi: float) -> float:
        G, H = jacobian(self.x), hessian(self.x, self.multipliers)
        upsilon = max(np.linalg.norm(G), np.linalg.norm(H), 1.0)
        return float((0.5 - self.o.beta) * self.eta2 / ((1 + self.eta1 + self.eta2) * upsilon**2 * psi**2))

    def step(self) -> None:
        o, G, H, kkt = self.o, jacobian(self.x), hessian(self.x, self.multipliers), self.kkt()
        null, B = linalg.null_space(G), H
        if np.linalg.eigvalsh(null.T @ H @ null)[0] < 1e-6:
            B = H + (o.xi_b + np.linalg.norm(H)) * np.eye(N)
            self.seen.add("shift")
        least = float(np.linalg.eigvalsh(G @ G.T)[0])
        psi = o.psi_scale * 20 * max(np.linalg.norm(B) ** 2, 1.0) / (min(least, 1.0) * min(o.xi_b, 1.0))
        self.delta = max(min(self.delta, self.trial_delta(psi)), o.delta_min)
        K = np.block([[B, G.T], [G, np.zeros((M, M))]])
        z = np.linalg.solve(K, -kkt)
        while True:
            theta = o.theta * min(1.0, np.linalg.norm(kkt) / self.first) ** o.forcing
            self.tolerances.append(theta * self.delta * np.linalg.norm(kkt) / (np.linalg.norm(K) * psi))
            if self.slope(z) <= -self.eta2 / 2 * (kkt @ kkt) or self.eta1 > 1e8 or self.eta2 < 1e-8:
                break
            self.seen.add("harder")
            self.eta1, self.eta2 = self.eta1 * o.nu**2, self.eta2 / o.nu
            self.delta = max(min(self.delta / o.nu**4, self.trial_delta(psi)), o.delta_min)
        value, slope, length = self.merit(self.x, self.multipliers), self.slope(z), 1.0
        while self.merit(self.x + length * z[:N], self.multipliers + length * z[N:]) > value + o.beta * length * slope:
            length /= 2
            self.seen.add("backtracked")
        self.x, self.multipliers = self.x + length * z[:N], self.multipliers + length * z[N:]


STARTS = [
    np.array([1.5, -0.5, 0.8, 1.2, -2.0]),
    np.array([0.4, 2.0, -1.0, 0.3, 0.9]),
    np.array([3.0, 1.0, 1.0, -2.0, 2.5]),
]
SETTINGS: list[dict[str, Any]] = [
    {"psi_scale": 1e-3, "delta_min": 1e-30},
    {"psi_scale": 1e-5, "delta_min": 1e-9, "theta": 0.3, "forcing": 1.5, "nu": 2.0, "beta": 0.2},
    {"eta1": 20.0, "eta2": 0.6, "xi_b": 3.0, "delta": 1e-3, "psi_scale": 1e-4, "delta_min": 1e-40},
]


def test_aisqp_takes_the_steps_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    advance = SketchedSystem.advance
    monkeypatch.setattr(
        SketchedSystem,
        "advance",
        lambda self, tolerance, most: (asked.append(tolerance), advance(self, tolerance, most))[1],
    )
    seen: set[str] = set()
    for start in STARTS:
        for settings in SETTINGS:
            problem = NumpyProblem(fun, grad, constraints, jacobian, hessian)
            options = SqpOptions(**settings)
            method = _AiSqp(problem, options, np.random.default_rng(0))
            asked.clear()
            point = method.start(start, np.array([0.2, -0.3]))
            hand = Hand(start, np.array([0.2, -0.3]), options)
            for _ in range(6):
                point = method.step(point)
                hand.step()
                np.testing.assert_allclose(point.x, hand.x, rtol=1e-8, atol=1e-10)
                np.testing.assert_allclose(point.multipliers, hand.multipliers, rtol=1e-7, atol=1e-9)
                found = (point.eta1, point.eta2, point.delta)
                np.testing.assert_allclose(found, (hand.eta1, hand.eta2, hand.delta), rtol=1e-8)
            np.testing.assert_allclose(asked, hand.tolerances, rtol=1e-7)
            seen |= hand.seen
    assert seen == {"shift", "harder", "backtracked"}, "every branch of the step is met"


def test_a_sketched_direction_meets_its_tolerance_and_not_a_chunk_earlier() -> None:
    problem = NumpyProblem(fun, grad, constraints, jacobian, hessian)
    options = SqpOptions(sketch="kaczmarz", psi_scale=1e-8, delta_min=1e-4)
    method = _AiSqp(problem, options, np.random.default_rng(1))
    point = method.start(STARTS[0], np.array([0.2, -0.3]))
    model, least = method._model(point)
    psi = 1e-8 * 20 * max(float(np.linalg.norm(model)) ** 2, 1.0) / (min(least, 1.0) * 0.1)
    moved, z = method._direction(point)
    system = method._system(moved, model)
    left = np.linalg.norm(system.matrix @ z + moved.kkt)
    allowed = moved.delta * np.linalg.norm(moved.kkt) / (system.norm * psi)
    assert 1e-12 < left <= allowed
    assert left > 1e-6 * allowed


def test_the_defaults_are_those_of_the_method() -> None:
    o = SqpOptions()
    assert (o.eta1, o.eta2, o.delta, o.beta, o.nu, o.xi_b) == (1.0, 0.1, 0.1, 0.1, 1.5, 0.1)
    assert (o.theta, o.forcing, o.psi_scale, o.delta_min, o.max_sketches) == (1.0, 0.0, 1.0, 1e-6, 100_000)
    assert o.sketch == "exact"


def test_a_start_that_meets_its_inequalities_leaves_nothing_for_the_slacks() -> None:
    """c(x) − s² = 0 where c ≥ 0.1; what is violated, or nearly, starts at s² = 0.1."""
    problem = SlackProblem(
        NumpyProblem(lambda x: float(x @ x), lambda x: 2 * x, lambda x: x - 1.0, lambda x: np.eye(3)),
        np.array([True, False, True]), 3,
    )  # fmt: skip
    found = problem.values(problem.start(np.array([3.5, 2.0, 0.7]))).constraints
    np.testing.assert_allclose(found, [0.0, 1.0, -0.3 - 0.1], atol=1e-15)


def test_differences_give_the_lagrangians_hessian() -> None:
    """Of ∇(x₀³ + x₀ x₁) + λ ∇(x₀² x₁), where no Hessian is given."""
    problem = NumpyProblem(
        lambda x: float(x[0] ** 3 + x[0] * x[1]), lambda x: np.array([3 * x[0] ** 2 + x[1], x[0]]),
        lambda x: np.array([x[0] ** 2 * x[1]]), lambda x: np.array([[2 * x[0] * x[1], x[0] ** 2]]),
    )  # fmt: skip
    x, weight = np.array([1.3, -0.7]), 2.5
    wanted = [[6 * x[0] + weight * 2 * x[1], 1 + weight * 2 * x[0]], [1 + weight * 2 * x[0], 0.0]]
    np.testing.assert_allclose(problem.hessian(x, np.array([weight])), wanted, atol=1e-8)
