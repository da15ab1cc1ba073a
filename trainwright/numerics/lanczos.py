"""Lanczos: the spectrum of a symmetric operator that is known by its products alone.

recurrence   H q_j = β_{j-1} q_{j-1} + α_j q_j + β_j q_{j+1}        `_tridiagonalise`
Ritz pairs   T = S diag(r) Sᵀ,  weights τ_i = S_{1i}²               `lanczos`
density      Σ_i τ_i δ(r - r_i) ≈ the spectral density of H, seen from one random direction
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BREAKDOWN = 1e-12
"""β below this part of the largest |T| ends the recurrence: the Krylov space is invariant but for rounding."""


@dataclass(frozen=True)
class Lanczos:
    """Ritz values in ascending order, their quadrature weights (they sum to 1), and Ritz vectors where asked for."""

    ritz_values: Tensor
    """[k], float64, on the CPU; k is `num_steps`, or less where the Krylov space was exhausted."""
    weights: Tensor
    """[k], float64, on the CPU."""
    vectors: Tensor | None = None
    """[num_dims, k], float64, orthonormal columns, on the operator's device."""


def lanczos(
    matvec: Callable[[Tensor], Tensor], num_dims: int, num_steps: int, *, generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", vectors: bool = False,
) -> Lanczos:  # fmt: skip
    r"""Approximate the spectrum of the symmetric operator `matvec` on R^num_dims from `num_steps` products.

    The start is a random unit vector drawn on the CPU by `generator`, so that every rank and device starts alike.
    The extreme Ritz values converge first; Σ τ_i f(r_i) estimates vᵀf(H)v for that start (averaged over starts and
    times num_dims: the trace of f(H)). Products are asked for in `dtype`; the basis is kept, and orthogonalised twice
    against all of itself, in float64: 8·num_steps·num_dims bytes on `device`.

    Raises `ValueError` for counts below 1, a product of another shape, and one that is not finite. Not for operators
    that are not symmetric (the result is then meaningless, unnoticed), nor for multiplicities: a repeated eigenvalue
    shows once.

    >>> spectrum = torch.linspace(-1.0, 4.0, 50, dtype=torch.float64)
    >>> found = lanczos(lambda v: spectrum * v, 50, 20, generator=torch.Generator().manual_seed(0))
    >>> round(found.ritz_values[-1].item(), 4), round(found.weights.sum().item(), 4)
    (4.0, 1.0)

    Source: Lanczos 1950; Ubaru, Chen & Saad 2017, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature.
    """
    if num_dims < 1 or num_steps < 1:
        raise ValueError(f"lanczos needs num_dims and num_steps of at least 1; got {num_dims} and {num_steps}")
    start = torch.randn(num_dims, generator=generator, dtype=torch.float64).to(device)
    diagonal, off_diagonal, basis = _tridiagonalise(_checked(matvec, num_dims, dtype), start, min(num_steps, num_dims))
    sides = torch.diag(torch.tensor(off_diagonal, dtype=torch.float64), 1) if off_diagonal else 0.0
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + sides
    ritz_values, rotation = torch.linalg.eigh(tridiagonal, UPLO="U")
    return Lanczos(ritz_values, rotation[0] ** 2, basis.T @ rotation.to(device) if vectors else None)


def _tridiagonalise(
    product: Callable[[Tensor], Tensor], start: Tensor, num_steps: int
) -> tuple[list[float], list[float], Tensor]:
    """Return T's diagonal and off-diagonal and the basis [k, num_dims], k ≤ num_steps."""
    basis = torch.empty(num_steps, start.numel(), dtype=torch.float64, device=start.device)
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    largest = 0.0
    for index in range(num_steps):
        residual = product(basis[index])
        diagonal.append(float(residual @ basis[index]))
        kept = basis[: index + 1]
        for _ in range(2):  # once leaves what rounding puts back; twice is enough (Kahan, Parlett)
            residual = residual - kept.T @ (kept @ residual)
        beta = float(residual.norm())
        largest = max(largest, abs(diagonal[-1]), beta)
        if index + 1 == num_steps:
            break
        if beta <= _BREAKDOWN * largest:
            return diagonal, off_diagonal, kept
        off_diagonal.append(beta)
        basis[index + 1] = residual / beta
    return diagonal, off_diagonal, basis


def _checked(matvec: Callable[[Tensor], Tensor], num_dims: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def product(vector: Tensor) -> Tensor:
        result = matvec(vector.to(dtype))
        if result.shape != (num_dims,):
            raise ValueError(
                f"lanczos needs a matvec that returns shape ({num_dims},); got {tuple(result.shape)}; flatten it"
            )
        result = result.to(vector)
        if not math.isfinite(float(result.abs().sum())):
            raise ValueError("lanczos needs finite products; got NaN or infinity; check the loss and the parameters")
        return result

    return product
