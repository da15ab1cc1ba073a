"""Conjugate gradients for a symmetric positive definite operator that is known by its products."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class CGOutcome(enum.Enum):
    """How the iteration ended; the value says what to do."""

    CONVERGED = "the residual met the tolerance"
    MAX_STEPS = "the step limit came first; allow more steps, loosen the tolerance, or give a preconditioner"
    NEGATIVE_CURVATURE = "the operator is not positive definite; shift it, or use the direction that showed it"
    NOT_FINITE = "a product was NaN or infinite; check the operator's values"


@dataclass(frozen=True)
class CG:
    """The last iterate x, the number of products taken, and how far A x is from the right side."""

    x: Tensor
    num_steps: int
    residual_norm: float
    outcome: CGOutcome
    direction: Tensor | None = None
    """With NEGATIVE_CURVATURE, the direction p with pᵀAp ≤ 0."""

    @property
    def converged(self) -> bool:
        return self.outcome is CGOutcome.CONVERGED


def cg(
    matvec: Callable[[Tensor], Tensor], rhs: Tensor, *, x0: Tensor | None = None, rtol: float = 1e-8, atol: float = 0.0,
    max_steps: int | None = None, preconditioner: Callable[[Tensor], Tensor] | None = None,
) -> CG:  # fmt: skip
    r"""Solve A x = rhs until ‖rhs - A x‖ ≤ max(rtol·‖rhs‖, atol), at most `max_steps` (default 10 n) products.

    `rhs` is a vector [n] of any real dtype and device; `preconditioner(r)` applies a positive definite M⁻¹ ≈ A⁻¹.
    The tested residual is the recurrence's; in low precision the true one may stall above it.

    Raises `ValueError` for a right side that is no vector. Not for operators that are not symmetric.

    >>> diagonal = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    >>> found = cg(lambda v: diagonal * v, torch.ones(3, dtype=torch.float64))
    >>> found.num_steps, [round(value, 6) for value in found.x.tolist()]
    (3, [1.0, 0.1, 0.01])

    Source: Hestenes & Stiefel 1952.
    """
    if rhs.dim() != 1:
        raise ValueError(f"cg needs a right side of one dimension; got shape {tuple(rhs.shape)}; flatten it")
    x = torch.zeros_like(rhs) if x0 is None else x0.clone()
    residual = rhs - matvec(x) if x0 is not None else rhs.clone()
    target = max(rtol * float(rhs.norm()), atol)
    limit = 10 * rhs.numel() if max_steps is None else max_steps
    return _iterate(matvec, x, residual, target, limit, preconditioner or torch.clone)


def _iterate(
    matvec: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, target: float, limit: int,
    precondition: Callable[[Tensor], Tensor],
) -> CG:  # fmt: skip
    scaled = precondition(residual)
    direction, product = scaled.clone(), residual @ scaled
    norm = float(residual.norm())
    for step in range(limit + 1):
        if norm <= target:
            return CG(x, step, norm, CGOutcome.CONVERGED)
        if step == limit:
            break
        image = matvec(direction)
        curvature = float(direction @ image)
        if not curvature > 0.0:
            outcome = CGOutcome.NEGATIVE_CURVATURE if curvature <= 0.0 else CGOutcome.NOT_FINITE
            return CG(x, step + 1, norm, outcome, direction if curvature <= 0.0 else None)
        length = product / curvature
        x = x + length * direction
        residual = residual - length * image
        scaled = precondition(residual)
        previous, product = product, residual @ scaled
        direction = scaled + (product / previous) * direction
        norm = float(residual.norm())
    return CG(x, limit, norm, CGOutcome.MAX_STEPS)
