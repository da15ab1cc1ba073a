"""Conjugate gradients preconditioned by symmetric over-relaxation (SSOR-PCG) on sparse matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..driver import Callback, Counts, Ended, Limits, Measured, drive
from ..outcome import Status
from .sweep import LowerSweep
from .system import LinearResult, System, as_result, back_like, make_system, scipy_atol, scipy_callback


@dataclass(frozen=True)
class _Iterate:
    x: np.ndarray
    residual: np.ndarray
    direction: np.ndarray
    product: float
    """rᵀ M⁻¹ r."""


def solve_ssor_pcg(
    A: Any, b: Any, omega: float = 1.0, x0: Any = None, *, rtol: float = 1e-8, atol: float = 0.0,
    max_iterations: int = 10_000, max_evaluations: int | None = None, max_seconds: float | None = None,
    callback: Callback | None = None, keep_history: bool = False, progress: Callable[[str], None] | None = None,
) -> LinearResult:  # fmt: skip
    """Solve A x = b for a symmetric positive definite A (n, n) by conjugate gradients, preconditioned with

        M = ω/(2 − ω) · (D/ω + L) D⁻¹ (D/ω + L)ᵀ,    A = L + D + Lᵀ.

    It stops at ‖b − A x‖ ≤ max(atol, rtol · ‖b − A x0‖) (the recurrence's residual). `omega` in (0, 2); near the best
    ω the iterations grow with κ^¼ on grids, and a wrong ω costs little. An iteration is one product with A and two
    sweeps. It computes in float64 on the CPU; `x` is an array or tensor as b is, of its dtype.
    `max_evaluations` limits products with A.

    When not: for matrices that are not symmetric positive definite (not symmetric: an error; not positive definite: the
    status BREAKDOWN, with the best iterate so far); multigrid (PyAMG) wins on large grids.

    >>> result = solve_ssor_pcg([[4.0, -1.0], [-1.0, 3.0]], [1.0, 2.0], omega=1.2)
    >>> result.success, result.x.round(6).tolist(), result.nit
    (True, [0.454545, 0.818182], 2)

    Source: Axelsson, *A generalized SSOR method*, BIT 1972.
    """
    system = make_system(A, b, x0, symmetric=True)
    method = _Pcg(system, omega)
    run = drive(
        method.start(), method.step, _measure, Limits(max_iterations, rtol, atol, max_evaluations, max_seconds),
        counts=method.counts, callback=callback, keep_history=keep_history, progress=progress,
    )  # fmt: skip
    return as_result(run, system.back(run.best.x), method.counts)


def ssor_pcg(
    A: Any, b: Any, x0: Any = None, *, omega: float = 1.0, rtol: float = 1e-8, atol: float = 0.0,
    maxiter: int = 10_000, callback: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:  # fmt: skip
    """Return (x, info) of `solve_ssor_pcg` as `scipy.sparse.linalg.cg` does: info 0 is solved, > 0 not yet, < 0 broken.

    As there, it stops at ‖b − A x‖ ≤ max(atol, rtol · ‖b‖), and `callback(x)` follows each step.

    >>> ssor_pcg([[2.0, 0.5], [0.5, 1.0]], [1.0, 1.0])[1]
    0
    """
    result = solve_ssor_pcg(
        A, b, omega, x0, rtol=0.0, atol=scipy_atol(b, rtol, atol), max_iterations=maxiter,
        callback=scipy_callback(callback, lambda state: back_like(b)(state.x)),
    )  # fmt: skip
    return result.x, result.info


class _Pcg:
    def __init__(self, system: System, omega: float) -> None:
        self.system, self.counts = system, Counts()
        self.sweep = LowerSweep(system.matrix, omega)
        self.weight = (2 - omega) / omega * system.matrix.diagonal()

    def start(self) -> _Iterate:
        self.counts.add(matvecs=1, nfev=1)
        residual = self.system.residual(self.system.x0)
        preconditioned = self.precondition(residual)
        return _Iterate(self.system.x0, residual, preconditioned, float(residual @ preconditioned))

    def precondition(self, residual: np.ndarray) -> np.ndarray:
        return self.sweep.solve_transposed(self.weight * self.sweep.solve(residual))

    def step(self, state: _Iterate) -> _Iterate:
        self.counts.add(matvecs=1, nfev=1)
        image = self.system.matrix @ state.direction
        curvature = float(state.direction @ image)
        if not curvature > 0:
            raise Ended(Status.BREAKDOWN)
        length = state.product / curvature
        x, residual = state.x + length * state.direction, state.residual - length * image
        preconditioned = self.precondition(residual)
        product = float(residual @ preconditioned)
        return _Iterate(x, residual, preconditioned + (product / state.product) * state.direction, product)


def _measure(state: _Iterate) -> Measured:
    size = math.sqrt(state.residual @ state.residual)
    return Measured(size, fun=size)
