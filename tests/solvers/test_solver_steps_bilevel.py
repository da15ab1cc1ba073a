"""BSVRB's and BO-REP's steps against steps written from their definitions in NumPy, with derivatives written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainwright.solvers.bilevel import BOREP, BSVRB
from trainwright.solvers.bilevel.problem import Blocks
from trainwright.solvers.values import Packing

Array = np.ndarray
NUM, DX, DY = 6, 3, 4


class Problem:
    """Blocks whose Hessians hang on y and on the batch; each derivative is written out.

    g = y'(A + N)y/2 + y'(M - B)x + q Σ y⁴/12 + ξ'y,  f = |y - c|²/2 + .05 |x|² + ζ'y + χ'x;  (N, M, ξ, ζ, χ) the batch.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        roots = random.normal(size=(NUM, DY, DY))
        self.A = 0.3 * roots @ roots.transpose(0, 2, 1) + 0.4 * np.eye(DY)
        self.B, self.c = random.normal(size=(NUM, DY, DX)) / 2, random.normal(size=(NUM, DY)) + 1
        self.q, self.x0, self.y0 = 0.7, random.normal(size=DX) + 1, random.normal(size=(NUM, DY))

    def sample(self, blocks: Tensor, generator: torch.Generator) -> list[Tensor]:
        num = len(blocks)
        shapes = ((num, DY, DY), (num, DY, DX), (num, DY), (num, DY), (num, DX))
        N, M, xi, zeta, chi = (0.3 * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        return [(N + N.mT) / 2, M, xi, zeta, chi]

    def lower(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        N, M, xi, _, _ = batch
        A, B = (torch.from_numpy(part)[blocks] for part in (self.A, self.B))
        quadratic = torch.einsum("ia,iab,ib->i", y, A + N, y) / 2 + torch.einsum("ia,iax,x->i", y, M - B, x)
        return quadratic + self.q * (y**4).sum(1) / 12 + (xi * y).sum(1)

    def upper(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        c = torch.from_numpy(self.c)[blocks]
        return (y - c).square().sum(1) / 2 + 0.05 * (x @ x) + (batch[3] * y).sum(1) + (batch[4] * x).sum(1)

    # By hand, for one block i and its row of the batch, all in NumPy.

    def lower_y(self, x: Array, y: Array, i: int, row: Any) -> Array:
        N, M, xi, _, _ = row
        return (self.A[i] + N) @ y + (M - self.B[i]) @ x + self.q * y**3 / 3 + xi

    def hessian(self, y: Array, i: int, row: Any) -> Array:
        return self.A[i] + row[0] + np.diag(self.q * y**2)

    def upper_y(self, y: Array, i: int, row: Any) -> Array:
        return y - self.c[i] + row[3]

    def hypergradient(self, x: Array, i: int, row: Any, v: Array) -> Array:
        return 0.1 * x + row[4] - (row[1] - self.B[i]).T @ v


def rows_of(batch: list[Tensor]) -> list[Any]:
    return list(zip(*(part.numpy() for part in batch)))


def floored(matrix: Array, floor: float) -> Array:
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.maximum(values, floor)) @ vectors.T


class HandBSVRB:
    """The method's state and step, block by block."""

    def __init__(self, problem: Problem, method: BSVRB, gamma: float) -> None:
        self.p, self.m, self.gamma, self.t = problem, method, gamma, 0
        self.left: dict[int, tuple[Array, Array]] = {i: (problem.y0[i], np.zeros(DY)) for i in range(NUM)}
        self.x, self.y, self.old_x, self.old_y = problem.x0, problem.y0.copy(), problem.x0, problem.y0.copy()
        self.s, self.u = np.zeros((NUM, DY)), np.zeros((NUM, DY))
        self.v, self.old_v = np.zeros((NUM, DY)), np.zeros((NUM, DY))
        self.H: dict[int, Array] = {}
        self.old_H: dict[int, Array] = {}
        self.last = [0] * NUM
        self.z = np.zeros(DX)

    def tracked(self, old_tracker: Array, new: Array, old: Array, seen: bool) -> Array:
        a = self.m.alpha
        return (1 - a) * old_tracker + a * new + self.gamma * (new - old) if seen else new

    def tracked_by_moves(self, old_tracker: Array, i: int, gradient: Callable[[Array, Array, Array], Array]) -> Array:
        """y and v have moved from where the block was left, by STORM; x in the last step alone, by γ."""
        a, here, left = self.m.alpha, (self.y[i], self.v[i]), self.left[i]
        by_y = gradient(self.x, *here) - gradient(self.x, *left)
        old = (self.old_y[i], self.old_v[i])
        by_x = gradient(self.x, *old) - gradient(self.old_x, *old)
        return (1 - a) * old_tracker + a * gradient(self.x, *here) + (1 - a) * by_y + self.gamma * by_x

    def step(self, blocks: list[int], rows: list[Any]) -> None:
        p, m = self.p, self.m
        seen = [self.last[i] > 0 for i in blocks]
        s, u, v, H, before = self.s.copy(), self.u.copy(), self.v.copy(), dict(self.H), dict(self.H)
        y, news, olds = self.y.copy(), [], []
        for i, row, known in zip(blocks, rows, seen):
            s[i] = self.tracked(
                self.s[i], p.lower_y(self.x, self.y[i], i, row), p.lower_y(self.old_x, self.old_y[i], i, row), known
            )
            if m.version == 2 and m.gamma is None and known:
                s[i] = self.tracked_by_moves(self.s[i], i, lambda x, y, v, i=i, row=row: p.lower_y(x, y, i, row))
            lag = min(self.t + 1 - self.last[i], m.max_catch_up) if m.catch_up else 1
            fy, old_fy = p.upper_y(self.y[i], i, row), p.upper_y(self.old_y[i], i, row)
            hessian, old_hessian = p.hessian(self.y[i], i, row), p.hessian(self.old_y[i], i, row)
            if m.version == 1:
                H[i] = floored(self.tracked(self.H.get(i, hessian), hessian, old_hessian, known), m.curvature_floor)
                before[i] = self.H.get(i, H[i])
                now_v = np.linalg.solve(self.H[i] if known else H[i], fy)
                then_v = np.linalg.solve(self.old_H[i] if known else H[i], old_fy)
            else:
                now_v, then_v = self.v[i], self.old_v[i]
                u[i] = self.tracked(self.u[i], hessian @ now_v - fy, old_hessian @ then_v - old_fy, known)
                if m.gamma is None and known:
                    u[i] = self.tracked_by_moves(
                        self.u[i], i, lambda x, y, v, i=i, row=row: p.hessian(y, i, row) @ v - p.upper_y(y, i, row)
                    )
                v[i] = self.v[i] - (m.step_v or m.step_y) * lag * u[i]
                v[i] *= min(1.0, m.v_bound / np.linalg.norm(v[i]))
                y[i] = self.y[i] - m.step_y * lag * s[i]
            news.append(p.hypergradient(self.x, i, row, now_v))
            olds.append(p.hypergradient(self.old_x, i, row, then_v))
        if m.version == 1:
            y = self.y - m.step_y * s
        new, old = np.mean(news, 0), np.mean(olds, 0)
        self.z = (1 - m.beta) * (self.z - old) + new if self.t else new
        self.old_x, self.old_y, self.old_v, self.old_H = self.x, self.y, self.v, before
        self.x, self.y, self.s, self.u, self.v, self.H = self.x - m.step_x * self.z, y, s, u, v, H
        self.t += 1
        for i in blocks:
            self.last[i] = self.t
            self.left[i] = self.old_y[i], self.old_v[i]


THEORY = (NUM - 3) / (3 * (1 - 0.3)) + (1 - 0.3)
CASES: list[tuple[dict[str, Any], float]] = [
    ({"version": 1, "curvature_floor": 0.9}, 0.7),
    ({"version": 1, "gamma": 1.3}, 1.3),
    ({"version": 2, "v_bound": 0.4}, THEORY),
    ({"version": 2}, THEORY),
    ({"version": 2, "gamma": THEORY}, THEORY),
    ({"version": 2, "step_v": 0.07, "catch_up": True, "max_catch_up": 2, "gamma": 0.5}, 0.5),
]


@pytest.mark.parametrize(("options", "gamma"), CASES)
def test_bsvrb_takes_the_step_written_out(options: dict[str, Any], gamma: float) -> None:
    problem = Problem()
    given: dict[str, Any] = {"step_x": 0.05, "step_y": 0.15, "num_sampled": 3, "alpha": 0.3, "beta": 0.4, **options}
    method = BSVRB(**given)
    packing, x = Packing.of(torch.from_numpy(problem.x0))
    oracle = Blocks(problem.upper, problem.lower, packing, NUM)
    state, hand = method.start(oracle, x, torch.from_numpy(problem.y0)), HandBSVRB(problem, method, gamma)
    generator = torch.Generator().manual_seed(2)
    bound = False
    for _ in range(7):
        before = generator.get_state()
        state = method.step(oracle, state, problem.sample, generator)
        generator.set_state(before)
        blocks = torch.randperm(NUM, generator=generator)[:3]
        hand.step(blocks.tolist(), rows_of(problem.sample(blocks, generator)))
        for name, wanted in (("x", hand.x), ("y", hand.y), ("slopes", hand.s), ("direction", hand.z)):
            np.testing.assert_allclose(getattr(state, name).numpy(), wanted, rtol=1e-10, atol=1e-12, err_msg=name)
        if method.version == 2:
            np.testing.assert_allclose(state.inner.numpy(), hand.v, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(state.inner_slopes.numpy(), hand.u, rtol=1e-10, atol=1e-12)
            bound = bound or bool(np.any(np.isclose(np.linalg.norm(hand.v, axis=1), method.v_bound)))
        else:
            for i, matrix in hand.H.items():
                np.testing.assert_allclose(state.inner[i].numpy(), matrix, rtol=1e-10, atol=1e-12)
                bound = bound or bool(np.isclose(np.linalg.eigvalsh(matrix)[0], method.curvature_floor))
    assert bound or ("v_bound" not in options and "curvature_floor" not in options), "the projection is reached"
    assert len(hand.H) == NUM or method.version == 2, "every block is met"


def test_bsvrb_moves_all_blocks_in_version_one_and_the_chosen_in_version_two() -> None:
    problem = Problem()
    packing, x = Packing.of(torch.from_numpy(problem.x0))
    for version, moved in ((1, 6), (2, 2)):
        oracle, generator = Blocks(problem.upper, problem.lower, packing, NUM), torch.Generator().manual_seed(0)
        method = BSVRB(step_x=0.01, step_y=0.1, num_sampled=2, version=version)  # type: ignore[arg-type]
        state = method.start(oracle, x, torch.from_numpy(problem.y0))
        for _ in range(9):
            before, state = state, method.step(oracle, state, problem.sample, generator)
        assert int((state.y != before.y).any(1).sum()) == moved


class HandBOREP:
    """Refinement, the lower loop in its ball, the linear step, normalised momentum."""

    def __init__(self, problem: Problem, method: BOREP, generator: torch.Generator) -> None:
        self.p, self.m, self.generator, self.k = problem, method, generator, 0
        self.x, self.y, self.z = problem.x0, problem.y0.copy(), np.zeros((NUM, DY))
        self.momentum = np.zeros(DX)

    def draw(self) -> list[Any]:
        return rows_of(self.p.sample(torch.arange(NUM), self.generator))

    def descended(self, radius: float, num_steps: int) -> Array:
        centre, y, total = self.y, self.y.copy(), np.zeros((NUM, DY))
        for _ in range(num_steps):
            rows = self.draw()
            for i in range(NUM):
                moved = y[i] - self.m.step_y * self.p.lower_y(self.x, y[i], i, rows[i])
                away = np.linalg.norm(moved - centre[i])
                y[i] = moved if away <= radius else centre[i] + radius * (moved - centre[i]) / away
            total = total + y
        return total / num_steps

    def step(self) -> None:
        p, m = self.p, self.m
        if self.k == 0:
            for epoch in range(m.num_refinements):
                self.y = self.descended(m.refine_radius / 2**epoch, m.refine_steps)
        elif self.k % m.period == 0:
            self.y = self.descended(m.radius, m.num_inner)
        rows = self.draw()
        for i in range(NUM):
            right = p.upper_y(self.y[i], i, rows[i])
            self.z[i] = self.z[i] - m.step_z * (p.hessian(self.y[i], i, rows[i]) @ self.z[i] - right)
        h = np.mean([p.hypergradient(self.x, i, rows[i], self.z[i]) for i in range(NUM)], 0)
        self.momentum = m.momentum * self.momentum + (1 - m.momentum) * h if self.k else h
        length = m.step_x * m.decay**self.k
        size = np.linalg.norm(self.momentum) if m.normalised else 1.0
        self.x = self.x - length * self.momentum / size
        self.k += 1


@pytest.mark.parametrize(
    "options",
    [
        {"period": 3, "num_inner": 4, "radius": 0.02, "refine_radius": 0.3},
        {"period": 2, "num_inner": 3, "radius": 50.0, "momentum": 0.6, "decay": 0.8},
        {"period": 1, "num_inner": 2, "num_refinements": 0, "normalised": False},
    ],
)
def test_borep_takes_the_step_written_out(options: dict[str, Any]) -> None:
    """Seven steps, so that the period, its first refresh, and the steps between are all met; the first ball binds."""
    problem = Problem()
    method = BOREP(
        **{"step_x": 0.05, "step_y": 0.2, "step_z": 0.15, "refine_steps": 3, "num_refinements": 2, **options}
    )
    packing, x = Packing.of(torch.from_numpy(problem.x0))
    oracle = Blocks(problem.upper, problem.lower, packing, NUM)
    state = method.start(oracle, x, torch.from_numpy(problem.y0))
    hand, generator = HandBOREP(problem, method, torch.Generator().manual_seed(4)), torch.Generator().manual_seed(4)
    for _ in range(7):
        state = method.step(oracle, state, problem.sample, generator)
        hand.step()
        for name, wanted in (("y", hand.y), ("z", hand.z), ("direction", hand.momentum), ("x", hand.x)):
            np.testing.assert_allclose(getattr(state, name).numpy(), wanted, rtol=1e-10, atol=1e-12, err_msg=name)


def test_first_directions_are_the_fresh_gradients_not_a_share_of_them() -> None:
    problem = Problem()
    packing, x = Packing.of(torch.from_numpy(problem.x0))
    oracle = Blocks(problem.upper, problem.lower, packing, NUM)
    state = BOREP(0.1, 0.1, 0.1).start(oracle, x, torch.from_numpy(problem.y0))
    assert bool(state.direction.isnan().all())
    assert not bool(state.z.any())
