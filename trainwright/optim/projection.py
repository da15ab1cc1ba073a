"""Projections of a matrix's gradient on a subspace of it: coordinates, or the span of a few directions.

index     columns, rows, entries or coordinates of the short side: P is a list of them, nothing is computed
matrix    the leading singular vectors, or random orthonormal ones, of the short side: P is [side, kept]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..artifacts import UserError

Kind = Literal["columns", "rows", "entries", "svd", "random", "randperm"]


@dataclass(frozen=True)
class Subspace:
    """Which part of a matrix [rows, columns] is kept.

    >>> part = Subspace.of("columns", (4, 6), density=0.5)
    >>> part.low_shape, part.projector_shape
    ((4, 3), (3,))
    """

    shape: tuple[int, int]
    side: int | None
    """The dimension that is cut down: 0, 1, or `None` for single entries."""
    kept: int
    dense: bool
    """Whether the projector is a matrix."""
    singular: bool = False

    @classmethod
    def of(cls, kind: str, shape: tuple[int, int], density: float) -> Subspace:
        """Return the subspace that a share `density` of the matrix leaves; `UserError` for an unknown kind.

        Columns, rows and entries: ⌊density · count⌋ of them; otherwise round(density · short side) directions, of
        the columns' space where there are at least as many rows as columns, of the rows' space otherwise.
        """
        rows, columns = shape
        # Within rounding of a whole number it is that number: 0.29 · 100 is 28.999…
        if kind == "columns":
            return cls(shape, 1, int(density * columns + 1e-9), False)
        if kind == "rows":
            return cls(shape, 0, int(density * rows + 1e-9), False)
        if kind == "entries":
            return cls(shape, None, int(density * rows * columns + 1e-9), False)
        if kind not in get_args(Kind):
            raise UserError(
                f"a projection is needed, one of block, {', '.join(get_args(Kind))}; got {kind!r}; choose one"
            )
        side = 1 if rows >= columns else 0
        return cls(shape, side, round(density * min(shape)), kind != "randperm", kind == "svd")

    @property
    def low_shape(self) -> tuple[int, ...]:
        """The shape of what is kept of the gradient."""
        if self.side is None:
            return (self.kept,)
        return (self.shape[0], self.kept) if self.side == 1 else (self.kept, self.shape[1])

    @property
    def projector_shape(self) -> tuple[int, ...]:
        """The shape of the projector."""
        return (self.shape[self.side or 0], self.kept) if self.dense else (self.kept,)

    @property
    def num_coordinates(self) -> int:
        """The number of columns, rows or entries of which some are kept."""
        return self.shape[0] * self.shape[1] if self.side is None else self.shape[self.side]

    def is_projector(self, given: Tensor) -> bool:
        """Return whether a tensor is a projector of this subspace: of its shape, and with coordinates that the matrix has."""
        if given.shape != self.projector_shape:
            return False
        return self.dense or not given.numel() or 0 <= int(given.min()) <= int(given.max()) < self.num_coordinates

    def choose(self, gradient: Tensor, generator: torch.Generator) -> Tensor:
        """Return a projector: of the gradient's own directions for `svd`, drawn on the CPU otherwise."""
        if self.singular:
            left, _, right = torch.linalg.svd(gradient, full_matrices=False)
            return (right.mH if self.side == 1 else left)[:, : self.kept].contiguous()
        if self.dense:
            drawn = torch.randn(self.projector_shape, generator=generator, dtype=torch.float64)
            return torch.linalg.qr(drawn)[0].to(gradient)
        drawn = torch.randperm(self.num_coordinates, generator=generator)[: self.kept].to(
            torch.int32
        )  # lets the permutation go
        return drawn.sort().values.to(gradient.device)  # in the order of memory, in which they are read

    def down(self, gradient: Tensor, projector: Tensor) -> Tensor:
        """Return the gradient's part in the subspace, `low_shape`."""
        if self.dense:
            return gradient @ projector if self.side == 1 else projector.mT @ gradient
        if self.side is None:
            return gradient.reshape(-1).index_select(0, projector)
        return gradient.index_select(self.side, projector)

    def add_up(self, matrix: Tensor, low: Tensor, projector: Tensor) -> Tensor:
        """Add what `low` stands for to `matrix`, in place; of coordinates, where `matrix` is 0."""
        if self.dense:
            factors = (low, projector.mT) if self.side == 1 else (projector, low)
            return matrix.addmm_(*factors)
        if self.side is None:
            matrix.view(-1).index_copy_(0, projector.long(), low)
            return matrix
        return matrix.index_copy_(self.side, projector.long(), low)

    def rest(self, gradient: Tensor, low: Tensor, projector: Tensor, tolerance: float) -> Tensor:
        """Return the gradient less its part in the subspace.

        Of directions, what is left is partly rounding, whose sign would count as much as any: elements of at most
        `tolerance` times the gradient's largest are 0.
        """
        if self.dense:
            left = self.add_up(gradient.clone(), -low, projector)
            return left.masked_fill_(left.abs() <= tolerance * gradient.abs().amax(), 0.0)
        if self.side is None:
            flat = gradient.reshape(-1).clone()
            return flat.index_fill_(0, projector.long(), 0.0).view(gradient.shape)
        return gradient.index_fill(self.side, projector.long(), 0.0)
