r"""Solves of (H + λB) δ = -g for one H and many shifts λ: dense, low rank, by products alone, or with H = 0.

    B   the metric, None (identity), [d] (diagonal) or [d, d]         `Metric`
    H   [d, d]; U [d, r] with H = UUᵀ; a product v ↦ Hv; nothing      `Dense`, `LowRank`, `MatrixFree`, `FirstOrder`

A solve returns `None` where H + λB is not positive definite: the caller's shift is too small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..artifacts import UserError
from ..numerics.cg import CGOutcome, cg


class Metric:
    """The norm ‖h‖² = ⟨Bh, h⟩ and its dual ⟨g, B⁻¹g⟩; `UserError` where B is not positive definite or has no such shape."""

    def __init__(self, matrix: Tensor | None, num_dims: int) -> None:
        self.matrix = matrix
        self._factor = None
        if matrix is None:
            return
        if matrix.shape not in ((num_dims,), (num_dims, num_dims)):
            raise UserError(
                f"a metric of shape ({num_dims},) or ({num_dims}, {num_dims}) is needed, for all parameters together; "
                f"got {tuple(matrix.shape)}; flatten the parameters in the optimizer's order"
            )
        if matrix.dim() == 2:
            self._factor, info = torch.linalg.cholesky_ex(matrix)
            positive = int(info) == 0
        else:
            positive = bool((matrix > 0).all())
        if not positive:
            raise UserError("a positive definite metric is needed; got one that is not; add a multiple of the identity")

    def times(self, vectors: Tensor) -> Tensor:
        """Return B v for v [d] or [d, r]."""
        if self.matrix is None:
            return vectors
        return self.matrix @ vectors if self.matrix.dim() == 2 else self._along(vectors) * vectors

    def solve(self, vectors: Tensor) -> Tensor:
        """Return B⁻¹ v for v [d] or [d, r]."""
        if self.matrix is None:
            return vectors
        if self._factor is None:
            return vectors / self._along(vectors)
        wide = vectors if vectors.dim() == 2 else vectors[:, None]
        return torch.cholesky_solve(wide, self._factor).view_as(vectors)

    def _along(self, vectors: Tensor) -> Tensor:
        """Return the diagonal, shaped to multiply the rows of `vectors`."""
        assert self.matrix is not None
        return self.matrix if vectors.dim() == 1 else self.matrix[:, None]

    def dual_norm(self, gradient: Tensor) -> float:
        return float((gradient @ self.solve(gradient)).clamp(min=0.0).sqrt())

    def dense(self, like: Tensor) -> Tensor:
        if self.matrix is None:
            return torch.eye(len(like), dtype=like.dtype, device=like.device)
        return self.matrix if self.matrix.dim() == 2 else torch.diag(self.matrix)


class ShiftedSystem(ABC):
    """(H + λB) δ = -g, to be solved for several λ."""

    @abstractmethod
    def solve(self, shift: float) -> Tensor | None:
        """Return δ, or `None` where H + λB is not positive definite."""

    def restart(self) -> None:  # noqa: B027
        """Take note that the parameters were moved and put back, whereby graphs of before are lost."""


class FirstOrder(ShiftedSystem):
    """H = 0: δ = -B⁻¹g/λ."""

    def __init__(self, gradient: Tensor, metric: Metric) -> None:
        self._direction = -metric.solve(gradient)

    def solve(self, shift: float) -> Tensor | None:
        return self._direction / shift


class Dense(ShiftedSystem):
    """H as a matrix: a Cholesky factor, d³/3, a shift."""

    def __init__(self, hessian: Tensor, gradient: Tensor, metric: Metric) -> None:
        _check_shape("dense", hessian, len(gradient), columns=len(gradient))
        self._hessian, self._gradient, self._metric = hessian.to(gradient), gradient, metric.dense(gradient)

    def solve(self, shift: float) -> Tensor | None:
        factor, info = torch.linalg.cholesky_ex(self._hessian + shift * self._metric)
        return None if int(info) else torch.cholesky_solve(-self._gradient[:, None], factor)[:, 0]


class LowRank(ShiftedSystem):
    """H = UUᵀ by Woodbury's identity; r = 1 is Sherman and Morrison's: r B⁻¹-products once, O(dr) a shift."""

    def __init__(self, factor: Tensor, gradient: Tensor, metric: Metric) -> None:
        factor = factor[:, None] if factor.dim() == 1 else factor
        _check_shape("low_rank", factor, len(gradient))
        self._scaled, self._along = metric.solve(factor.to(gradient)), metric.solve(gradient)
        self._inner, self._onto = factor.to(gradient).T @ self._scaled, factor.to(gradient).T @ self._along

    def solve(self, shift: float) -> Tensor | None:
        inner = self._inner + shift * torch.eye(len(self._inner), dtype=self._inner.dtype, device=self._inner.device)
        factor, info = torch.linalg.cholesky_ex(inner)
        if int(info):
            return None
        weights = torch.cholesky_solve(self._onto[:, None], factor)[:, 0]
        return (self._scaled @ weights - self._along) / shift


class MatrixFree(ShiftedSystem):
    """H by its products: conjugate gradients preconditioned by B, from zero, to `rtol`·‖g‖."""

    def __init__(
        self, product: Callable[[Tensor], Tensor], gradient: Tensor, metric: Metric, rtol: float, max_steps: int | None,
        restart: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._product, self._gradient, self._metric = product, gradient, metric
        self._rtol, self._max_steps, self._restart = rtol, max_steps, restart

    def restart(self) -> None:
        if self._restart is not None:
            self._restart()

    def solve(self, shift: float) -> Tensor | None:
        found = cg(
            lambda v: self._product(v) + shift * self._metric.times(v), -self._gradient,
            rtol=self._rtol, max_steps=self._max_steps, preconditioner=self._metric.solve,
        )  # fmt: skip
        ended = (CGOutcome.CONVERGED, CGOutcome.MAX_STEPS)  # a truncated step is still one of descent
        return found.x if found.outcome in ended else None


def _check_shape(solver: str, matrix: Tensor, rows: int, columns: int | None = None) -> None:
    if matrix.dim() != 2 or matrix.shape[0] != rows or (columns is not None and matrix.shape[1] != columns):
        needed = f"({rows}, {'r' if columns is None else columns})"
        raise UserError(
            f"solver={solver!r} needs a hessian of shape {needed}; got {tuple(matrix.shape)}; "
            "give the rows in the order of the parameters"
        )
