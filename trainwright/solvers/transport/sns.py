"""Sinkhorn-Newton-Sparse: a few Sinkhorn steps, then Newton steps on the dual with all but the largest entries dropped.

Hessian of the dual (negated, times reg)  M = [[diag(P 1), S], [Sᵀ, diag(Pᵀ 1)]]    `_newton_matrix`
S: the `density` · n largest entries of the plan P, the diagonals whole            `problem.Problem.evaluate`
step (f, g) += α · reg · M⁻¹ (a − P 1, b − Pᵀ 1), CG with a Jacobi preconditioner    `_direction`
α by backtracking on the dual                                                        `_line_search`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import linalg as sparse_linalg
from torch import Tensor

from ...artifacts import UserError
from ..driver import Callback, Counts, Limits, drive
from .problem import Evaluation, Problem, make_problem
from .result import Potentials, TransportResult, as_result, measure
from .sinkhorn import sinkhorn_step, start

ARMIJO = 1e-4
SMALLEST_STEP = 1 / 2
"""Shorter steps are left to the damping."""
SMALLEST_STEP_UNDAMPED = 1 / 1024
ROUNDING = 1e-14
LEAST_DAMPING = 1e-4
NUM_DAMPINGS = 5
SLOW = 0.1
"""A full step that leaves more than this share of the error asks for more entries."""


@dataclass(frozen=True)
class SnsOptions:
    """`num_sinkhorn` Sinkhorn steps first (default 8; the paper's 20 where not adaptive), then Newton steps.

    Newton steps keep `density` · max(n, m) entries of the plan.

    `adaptive=False` is the paper's method: the number of kept entries fixed, no damping, backtracking alone.
    With `adaptive`, full steps that converge slowly double the entries (to at most `max_share` of n · m), and short steps
    damp the Newton matrix. `rescue`: Sinkhorn steps put in where no Newton step rises. `cg_rtol`: of the linear solver.
    """

    num_sinkhorn: int | None = None
    density: float = 5.0
    adaptive: bool = True
    max_share: float = 0.125
    cg_rtol: float = 1e-8
    rescue: int = 10

    def __post_init__(self) -> None:
        if (self.num_sinkhorn or 0) < 0 or self.rescue < 1:
            raise UserError(
                f"num_sinkhorn ≥ 0 and rescue ≥ 1 are needed; got {self.num_sinkhorn} and {self.rescue}; "
                "leave them at the defaults"
            )
        if not (self.density > 0 and 0 < self.cg_rtol < 1 and 0 < self.max_share <= 1):
            raise UserError(
                f"density > 0 (entries a row), cg_rtol in (0, 1), max_share in (0, 1] are needed; got {self.density}, "
                f"{self.cg_rtol}, {self.max_share}; try density=5, cg_rtol=1e-8, max_share=0.125"
            )

    @property
    def sinkhorn_first(self) -> int:
        return self.num_sinkhorn if self.num_sinkhorn is not None else (8 if self.adaptive else 20)


def solve_sns(
    a: Any, b: Any, cost: Any, reg: float, *, rtol: float = 0.0, atol: float = 1e-9, max_iterations: int = 500,
    max_evaluations: int | None = None, max_seconds: float | None = None, options: SnsOptions | None = None,
    callback: Callback | None = None, keep_history: bool = False, progress: Callable[[str], None] | None = None,
) -> TransportResult:  # fmt: skip
    """Solve entropic transport, min ⟨P, C⟩ + reg Σ P (log P − 1) with marginals a (n,), b (m,), by sparse Newton steps.

    `reg` is in the cost's units (1/η of the paper; its experiments: cost in [0, 1], reg = 1/1200). It stops when the L1
    error of both marginals is at most `atol`, or `rtol` times that at the start. A Newton step costs a pass over the cost, a
    search for the largest entries and some hundred products with a sparse matrix of `density` · max(n, m) entries, on the
    CPU in float64; the cost
    matrix stays the only dense n × m array.

    When not: for large reg (no entry is negligible, and Sinkhorn converges in some ten steps) a method that keeps the kernel
    exp(−C/reg) in memory, such as POT's `sinkhorn_stabilized`, is two to four times faster. The paper's own
    method (`adaptive=False`) has only a linear rate where the kept entries do not connect the plan's support (density
    ≤ 3 for a random cost) and does not converge in reasonable time for a cost with many ties (distances in the L1 norm
    between pixels) unless many Sinkhorn steps come first; the adaptive rules are ours and mend both.

    Weights may be zero: such points get potentials of −∞ and a plan of zero. Marginals must sum to one within 1e-6 and are
    divided by their sums; that is all that is normalised: the cost is taken as it is.

    Errors: `UserError` for a cost that is negative or not finite, negative weights, marginals that do not sum to one, reg ≤ 0.

    >>> import torch
    >>> cost = torch.rand(60, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> result = solve_sns([], [], cost, reg=1 / 300, atol=1e-12)
    >>> result.success, result.num_newton < 20, result.marginal_error < 1e-12
    (True, True, True)

    Source: Tang et al., *Accelerating Sinkhorn with Sparse Newton Iterations*, ICLR 2024. Departures: the adaptive rules
    of `SnsOptions`; exactly the number of entries asked for is kept (a threshold keeps all ties); no augmented term: the
    right-hand side is orthogonal to the null vector (1, −1) already.
    """
    method = _Sns(make_problem(a, b, cost, reg), options or SnsOptions())
    run = drive(
        start(method.problem, method.counts), method.step, lambda state: measure(method.problem, state),
        Limits(max_iterations, rtol, atol, max_evaluations, max_seconds, float("inf")),
        counts=method.counts, callback=callback, keep_history=keep_history, progress=progress,
    )  # fmt: skip
    return as_result(method.problem, run)


class _Sns:
    def __init__(self, problem: Problem, options: SnsOptions) -> None:
        self.problem, self.options, self.counts = problem, options, Counts()
        num_rows, num_cols = problem.cost.shape
        most = max(round(options.max_share * num_rows * num_cols), 1)
        self.num_kept = min(round(options.density * max(num_rows, num_cols)), num_rows * num_cols)
        self.most_kept = max(most, self.num_kept)
        self.sinkhorn_left = options.sinkhorn_first
        self.damping = 0.0

    def step(self, state: Potentials) -> Potentials:
        if self.sinkhorn_left == 0:
            moved = self._newton_step(state)
            if moved is not None:
                return moved
            self.sinkhorn_left = self.options.rescue
            self._keep_more()
        self.sinkhorn_left -= 1
        return sinkhorn_step(self.problem, state, self.counts)

    def _newton_step(self, state: Potentials) -> Potentials | None:
        """Return the next state, or `None` where no step of useful length raises the dual."""
        self.counts.add(newton=1)
        if state.kept is None or state.kept.values.numel() < self.num_kept:
            state = self._evaluated(state.f, state.g)
        for _ in range(NUM_DAMPINGS if self.options.adaptive else 1):
            moved, length = self._line_search(state, *self._direction(state))
            self._learn(state, moved, length)
            if moved is not None:
                return moved
        return None

    def _learn(self, state: Potentials, moved: Potentials | None, length: float) -> None:
        """Damp more after short steps, less after full ones; keep more entries where full steps converge slowly."""
        if not self.options.adaptive:
            return
        if moved is None or length < 1:
            self.damping = max(10 * self.damping, LEAST_DAMPING)
            return
        undamped = self.damping == 0.0
        self.damping = self.damping / 10 if self.damping > LEAST_DAMPING else 0.0
        errors = measure(self.problem, moved).residual, measure(self.problem, state).residual
        if undamped and errors[0] > SLOW * errors[1]:
            self._keep_more()

    def _keep_more(self) -> None:
        if self.options.adaptive:
            self.num_kept = min(2 * self.num_kept, self.most_kept)

    def _evaluated(self, f: Tensor, g: Tensor) -> Potentials:
        self.counts.add(nfev=1)
        found: Evaluation = self.problem.evaluate(f, g, self.num_kept)
        return Potentials(f, g, found.rows.log(), found.cols, found.kept, found.dual, stage="newton")

    def _direction(self, state: Potentials) -> tuple[Tensor, Tensor]:
        gradient = self._gradient(state)
        matrix, scale = _newton_matrix(state, self.damping)
        solution, iterations = _cg(matrix, scale * gradient.cpu().numpy(), self.options.cg_rtol)
        self.counts.add(ncg=iterations)
        step = self.problem.reg * torch.from_numpy(scale * solution).to(gradient.device)
        num_rows = self.problem.a.numel()
        return step[:num_rows], step[num_rows:]

    def _gradient(self, state: Potentials) -> Tensor:
        return torch.cat([self.problem.a - state.log_rows.exp(), self.problem.b - state.cols])

    def _line_search(self, state: Potentials, df: Tensor, dg: Tensor) -> tuple[Potentials | None, float]:
        direction = torch.cat([df, dg])
        slope = float(self._gradient(state) @ direction)
        length = 1.0
        while length >= (SMALLEST_STEP if self.options.adaptive else SMALLEST_STEP_UNDAMPED):
            trial = self._evaluated(state.f + length * df, state.g + length * dg)
            sums_are_positive = bool(torch.isfinite(trial.log_rows).all()) and bool((trial.cols > 0).all())
            if sums_are_positive and self._rises(state, trial, length * slope, length * direction):
                return trial, length
            length /= 2
        return None, length

    def _rises(self, state: Potentials, trial: Potentials, rise: float, step: Tensor) -> bool:
        """Armijo's rule; where the rise is below rounding, the slope at the trial point decides (the dual is concave)."""
        if trial.dual >= state.dual + ARMIJO * rise and ARMIJO * rise > self._rounding(state):
            return True
        level = trial.dual >= state.dual - self._rounding(state)
        closer = measure(self.problem, trial).residual <= measure(self.problem, state).residual
        return level and closer and float(self._gradient(trial) @ step) >= (2 * ARMIJO - 1) * rise

    def _rounding(self, state: Potentials) -> float:
        size = self.problem.a @ state.f.abs() + self.problem.b @ state.g.abs()
        return ROUNDING * (float(size) + self.problem.reg)


def _newton_matrix(state: Potentials, damping: float) -> tuple[sparse.csr_array, np.ndarray]:
    """Return the sparse matrix scaled to a unit diagonal, and the scale D^(−1/2) of shape (n + m,)."""
    assert state.kept is not None
    num_rows, num_cols = state.log_rows.numel(), state.cols.numel()
    diagonal = torch.cat([state.log_rows.exp(), state.cols]).cpu().numpy()
    scale = 1.0 / np.sqrt(diagonal)
    rows, cols = state.kept.rows.cpu().numpy(), state.kept.cols.cpu().numpy()
    values = state.kept.values.cpu().numpy() * scale[rows] * scale[num_rows + cols]
    upper = sparse.csr_array((values, (rows, cols)), shape=(num_rows, num_cols))
    eye_rows, eye_cols = (1 + damping) * sparse.eye_array(num_rows), (1 + damping) * sparse.eye_array(num_cols)
    return sparse.csr_array(sparse.block_array([[eye_rows, upper], [upper.T, eye_cols]])), scale


def _cg(matrix: sparse.csr_array, right: np.ndarray, rtol: float) -> tuple[np.ndarray, int]:
    count = [0]

    def tell(_: np.ndarray) -> None:
        count[0] += 1

    solution, _ = sparse_linalg.cg(matrix, right, rtol=rtol, maxiter=2 * right.size, callback=tell)
    return solution, count[0]
