"""Successive over-relaxation on sparse matrices: `sor` as in `scipy.sparse.linalg`, `solve_sor` with the full result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...artifacts import UserError
from ..driver import Callback, Counts, Limits, Measured, drive
from .sweep import LowerSweep
from .system import LinearResult, as_result, back_like, make_system, scipy_atol, scipy_callback


@dataclass(frozen=True)
class _Iterate:
    x: np.ndarray
    residual: np.ndarray


def solve_sor(
    A: Any, b: Any, omega: float = 1.0, x0: Any = None, *, rtol: float = 1e-8, atol: float = 0.0,
    max_iterations: int = 10_000, max_evaluations: int | None = None, max_seconds: float | None = None,
    callback: Callback | None = None, keep_history: bool = False, progress: Callable[[str], None] | None = None,
) -> LinearResult:  # fmt: skip
    """Solve A x = b (A of shape (n, n), sparse or dense) by x ← x + (D/ω + L)⁻¹ (b − A x), D and L of A's lower triangle.

    It stops at ‖b − A x‖ ≤ max(atol, rtol · ‖b − A x0‖). `omega` in (0, 2): 1 is Gauss-Seidel; for consistently
    ordered matrices (grids) the best is `optimal_omega(ρ)`. It converges for every symmetric positive definite A, and
    diverges for an indefinite one (status DIVERGED). It computes in float64 on the CPU; `x` is an array or tensor as b is, of
    its dtype. `max_evaluations` limits products with A.

    When not: alone on large ill-conditioned systems. The iterations grow with √κ at the best ω and with κ at others;
    `solve_ssor_pcg` needs fewer and forgives a wrong ω, multigrid (PyAMG) does not grow with n.

    Errors: `UserError` for a matrix that is not square, has a zero on its diagonal or is not finite; ω out of range.

    >>> result = solve_sor([[4.0, -1.0], [-1.0, 3.0]], [1.0, 2.0], omega=1.05)
    >>> result.success, result.x.round(6).tolist()
    (True, [0.454545, 0.818182])

    Source: Young, *Iterative Methods for Solving Partial Difference Equations of Elliptic Type*, 1954.
    """
    system = make_system(A, b, x0)
    sweep, counts = LowerSweep(system.matrix, omega), Counts(matvecs=1, nfev=1)

    def step(state: _Iterate) -> _Iterate:
        x = state.x + sweep.solve(state.residual)
        counts.add(matvecs=1, nfev=1)
        return _Iterate(x, system.residual(x))

    def measure(state: _Iterate) -> Measured:
        size = math.sqrt(state.residual @ state.residual)
        return Measured(size, fun=size)

    run = drive(
        _Iterate(system.x0, system.residual(system.x0)), step, measure,
        Limits(max_iterations, rtol, atol, max_evaluations, max_seconds),
        counts=counts, callback=callback, keep_history=keep_history, progress=progress,
    )  # fmt: skip
    return as_result(run, system.back(run.best.x), counts)


def sor(
    A: Any, b: Any, x0: Any = None, *, omega: float = 1.0, rtol: float = 1e-8, atol: float = 0.0,
    maxiter: int = 10_000, callback: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:  # fmt: skip
    """Return (x, info) of `solve_sor` as `scipy.sparse.linalg.cg` does: info 0 is solved, > 0 not yet, < 0 broken down.

    As there, it stops at ‖b − A x‖ ≤ max(atol, rtol · ‖b‖), and `callback(x)` follows each step.

    >>> sor([[2.0, 0.5], [0.5, 1.0]], [1.0, 1.0])[1]
    0
    """
    result = solve_sor(
        A, b, omega, x0, rtol=0.0, atol=scipy_atol(b, rtol, atol), max_iterations=maxiter,
        callback=scipy_callback(callback, lambda state: back_like(b)(state.x)),
    )  # fmt: skip
    return result.x, result.info


def optimal_omega(spectral_radius: float) -> float:
    """Return Young's ω* = 1 + (ρ / (1 + √(1 − ρ²)))² for ρ, the spectral radius of Jacobi's iteration I − D⁻¹A.

    It holds for consistently ordered matrices, such as the five-point Laplacian (ρ = cos(π h)), and is asymptotic: for
    loose tolerances a smaller ω needs fewer iterations. Errors: `UserError` outside 0 ≤ ρ < 1.

    >>> round(optimal_omega(math.cos(math.pi / 11)), 4)
    1.5604
    """
    if not 0 <= spectral_radius < 1:
        raise UserError(
            f"a spectral radius in [0, 1) is needed; got {spectral_radius}; Jacobi's iteration does not converge, "
            "so the formula does not apply"
        )
    return 1 + (spectral_radius / (1 + math.sqrt(1 - spectral_radius**2))) ** 2
