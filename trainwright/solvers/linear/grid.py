"""Families of systems to learn directions for: Poisson problems on grids, and any operator by its Ritz vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from ...artifacts import UserError
from ...numerics.lanczos import lanczos
from ..seeds import as_generator

LOW_WEIGHT = 9.0
"""How much larger coefficients of the lower half of the spectrum are drawn, as in the paper's data."""


class Family(Protocol):
    """What training asks for: products with A, batched over leading dimensions, and random right-hand sides."""

    shape: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor: ...

    def sample(self, num: int, generator: torch.Generator) -> Tensor: ...


class PoissonGrid:
    """The 3-, 5- or 7-point Laplacian 2d x − Σ neighbours on a grid of 1, 2 or 3 dimensions, matrix-free.

    It is h² (−Δ). boundary "dirichlet": neighbours outside are zero; "neumann": they mirror the edge, A is singular with
    the constants as null space, and right-hand sides need mean zero (`project`).

    >>> grid = PoissonGrid((3,))
    >>> grid.apply(torch.tensor([1.0, 2.0, 4.0])).tolist()
    [0.0, -1.0, 6.0]
    """

    def __init__(self, shape: Sequence[int], boundary: Literal["dirichlet", "neumann"] = "dirichlet") -> None:
        self.shape = tuple(int(size) for size in shape)
        if not 1 <= len(self.shape) <= 3 or min(self.shape) < 1 or boundary not in ("dirichlet", "neumann"):
            raise UserError(
                f"a shape of 1 to 3 sizes ≥ 1 and a boundary 'dirichlet' or 'neumann' are needed; "
                f"got {tuple(shape)} and {boundary!r}; try (64, 64)"
            )
        self.boundary = boundary

    def apply(self, x: Tensor) -> Tensor:
        """Return A x for x of shape (..., *shape)."""
        result = 2 * len(self.shape) * x
        for dim, size in enumerate(self.shape, start=-len(self.shape)):
            if size > 1:
                result.narrow(dim, 0, size - 1).sub_(x.narrow(dim, 1, size - 1))
                result.narrow(dim, 1, size - 1).sub_(x.narrow(dim, 0, size - 1))
            if self.boundary == "neumann":
                for edge in (0, size - 1):
                    result.narrow(dim, edge, 1).sub_(x.narrow(dim, edge, 1))
        return result

    def project(self, x: Tensor) -> Tensor:
        """Return x without its part in A's null space (Neumann: without its mean)."""
        if self.boundary == "dirichlet":
            return x
        return x - x.mean(dim=tuple(range(-len(self.shape), 0)), keepdim=True)

    def matrix(self) -> sparse.csr_array:
        """Return A as a sparse matrix on vectors in C order."""
        total = sparse.csr_array((math.prod(self.shape),) * 2, dtype=np.float64)
        for dim, size in enumerate(self.shape):
            diagonal = np.full(size, 2.0)
            if self.boundary == "neumann":
                diagonal[0] -= 1
                diagonal[-1] -= 1
            sides = -np.ones(size - 1)
            line = sparse.diags_array([sides, diagonal, sides], offsets=[-1, 0, 1], shape=(size, size))
            before, after = math.prod(self.shape[:dim]), math.prod(self.shape[dim + 1 :])
            total = total + sparse.kron(sparse.kron(sparse.eye_array(before), line), sparse.eye_array(after))
        return sparse.csr_array(total)

    def sample(self, num: int, generator: torch.Generator) -> Tensor:
        """Return unit right-hand sides (num, *shape) of random coefficients in A's eigenvectors, low ones weighted."""
        low = self._eigenvalues() <= self._eigenvalues().median()
        values = torch.randn(num, *self.shape, generator=generator) * torch.where(low, LOW_WEIGHT, 1.0)
        for dim, size in enumerate(self.shape, start=1):
            values = torch.tensordot(values, self._basis(size), dims=([dim], [1])).movedim(-1, dim)
        return _unit(self.project(values))

    def _eigenvalues(self) -> Tensor:
        total = torch.zeros(self.shape)
        for dim, size in enumerate(self.shape):
            line = self._line_eigenvalues(size)
            total = total + line.reshape([-1 if other == dim else 1 for other in range(len(self.shape))])
        return total

    def _line_eigenvalues(self, size: int) -> Tensor:
        first, parts = (1, size + 1) if self.boundary == "dirichlet" else (0, size)
        return 2 - 2 * torch.cos(math.pi * torch.arange(first, first + size) / parts)

    def _basis(self, size: int) -> Tensor:
        """Return the orthogonal eigenvectors of one dimension, a column each (size, size): sines or cosines."""
        places = torch.arange(size, dtype=torch.float64)
        if self.boundary == "dirichlet":
            basis = torch.sin(math.pi * torch.outer(places + 1, places + 1) / (size + 1))
        else:
            basis = torch.cos(math.pi * torch.outer(places + 0.5, places) / size)
        return (basis / basis.norm(dim=0)).float()


class RitzFamily:
    """Any symmetric positive definite operator, with right-hand sides drawn from Ritz vectors of a Lanczos run.

    apply: products with A on x of shape (batch, *shape). The lower half of the Ritz vectors, and `extra_low` more, are
    drawn with `LOW_WEIGHT` times larger coefficients; Ritz values below 1e-8 of the largest are left out. The
    vectors take 8 · num_vectors · n bytes.

    >>> family = RitzFamily(PoissonGrid((4, 4)).apply, (4, 4), num_vectors=8)
    >>> family.sample(3, torch.Generator().manual_seed(1)).shape
    torch.Size([3, 4, 4])
    """

    def __init__(
        self, apply: Callable[[Tensor], Tensor], shape: Sequence[int], num_vectors: int, *, extra_low: int = 0,
        seed: int | torch.Generator = 0,
    ) -> None:  # fmt: skip
        self.shape = tuple(shape)
        self.apply = apply
        found = lanczos(
            lambda v: apply(v.reshape(1, *self.shape)).reshape(-1), math.prod(self.shape), num_vectors,
            generator=as_generator(seed), vectors=True,
        )  # fmt: skip
        assert found.vectors is not None
        keep = found.ritz_values > 1e-8 * found.ritz_values[-1]
        self.vectors = found.vectors[:, keep].float()
        self.num_low = self.vectors.shape[1] // 2 + extra_low

    def sample(self, num: int, generator: torch.Generator) -> Tensor:
        """Return unit right-hand sides (num, *shape)."""
        weights = torch.randn(num, self.vectors.shape[1], generator=generator)
        weights[:, : self.num_low] *= LOW_WEIGHT
        return _unit((weights @ self.vectors.T).reshape(num, *self.shape))


def _unit(values: Tensor) -> Tensor:
    norms = values.flatten(1).norm(dim=1)
    return values / norms.reshape(-1, *[1] * (values.dim() - 1))


def as_product(A: Any, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return products with A on tensors of `shape`, for a callable on such tensors, a LinearOperator or a matrix."""
    size = math.prod(shape)
    A = np.asarray(A) if isinstance(A, list | tuple) else A
    if hasattr(A, "dtype") and np.dtype(bool if A.dtype is None or isinstance(A, Tensor) else A.dtype).kind == "c":
        raise UserError(
            f"a real A is needed; got {A.dtype}; solve for real and imaginary parts together, as one system"
        )
    if isinstance(A, Tensor) and tuple(A.shape) == (size, size):
        return lambda x: (A.to(x.dtype) @ x.reshape(-1)).reshape(x.shape)
    if hasattr(A, "matvec") or sparse.issparse(A) or isinstance(A, np.ndarray | Tensor):
        if tuple(A.shape) != (size, size):
            raise UserError(
                f"an A of shape ({size}, {size}) is needed for a b of {size} entries; got {tuple(A.shape)}; give such"
            )
        return lambda x: torch.from_numpy(np.asarray(A @ x.cpu().numpy().reshape(-1))).to(x.device).reshape(x.shape)
    if not callable(A):
        raise UserError(f"a matrix, LinearOperator or function is needed as A; got {type(A).__name__}; try grid.apply")
    return A
