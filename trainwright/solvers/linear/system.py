"""A linear system as the relaxation methods read it, and what every linear solver of this family returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import linalg as sparse_linalg
from torch import Tensor

from ...artifacts import UserError
from ..driver import LoopResult
from ..outcome import Result, Status

Array = np.ndarray
BAD = (Status.BREAKDOWN, Status.NOT_FINITE, Status.DIVERGED, Status.STALLED)
SYMMETRY = 1e-10


@dataclass(frozen=True)
class LinearResult(Result):
    """`x` is what `b` was (an array or a tensor, of its dtype; float64 inside); `fun` and `residual_norm` are ‖b − A x‖₂."""

    residual_norm: float
    num_matvecs: int

    @property
    def info(self) -> int:
        """As in `scipy.sparse.linalg`: 0 solved, > 0 the steps done without reaching the tolerance, < 0 broken down."""
        return 0 if self.success else (-1 if self.status in BAD else max(self.nit, 1))


@dataclass(frozen=True)
class System:
    """A x = b with A sparse (n, n) and b, x0 of shape (n,), all in float64."""

    matrix: sparse.csr_array
    right: Array
    x0: Array
    back: Callable[[Array], Any]
    """Turns a solution into what b was."""

    def residual(self, x: Array) -> Array:
        return np.asarray(self.right - self.matrix @ x)


def make_system(A: Any, b: Any, x0: Any = None, *, symmetric: bool = False) -> System:
    """Check a square system with a diagonal that is nowhere zero; A may be sparse or dense, of SciPy, NumPy or torch."""
    matrix, right = _matrix(A), _vector(b)
    size = matrix.shape[0]
    if matrix.shape != (size, size) or right.shape != (size,):
        raise UserError(
            f"a square A and a b of as many entries are needed; got shapes {matrix.shape} and {right.shape}; "
            "for least squares form the normal equations, or use scipy.sparse.linalg.lsqr"
        )
    start = np.zeros(size) if x0 is None else _vector(x0)
    if start.shape != (size,):
        raise UserError(f"x0 of shape ({size},) is needed; got {start.shape}; leave x0 out to start at zero")
    if not (np.isfinite(matrix.data).all() and np.isfinite(right).all() and np.isfinite(start).all()):
        raise UserError("finite numbers are needed in A, b and x0; got NaN or infinity; check how they are assembled")
    zeros = np.flatnonzero(matrix.diagonal() == 0)
    if zeros.size:
        raise UserError(
            f"a diagonal without zeros is needed for relaxation; got A[{zeros[0]}, {zeros[0]}] = 0; the matrix may be "
            "singular: reorder its rows, or use scipy.sparse.linalg.gmres"
        )
    if symmetric:
        _check_symmetric(matrix)
    return System(matrix, right, start, back_like(b))


def _check_symmetric(matrix: sparse.csr_array) -> None:
    difference = abs(matrix - matrix.T)
    worst, size = (float(m.max()) if m.nnz else 0.0 for m in (difference, abs(matrix)))
    if worst > SYMMETRY * size:
        raise UserError(
            f"a symmetric A is needed; got |A − Aᵀ| up to {worst:g}; use solve_sor, or scipy.sparse.linalg.gmres"
        )
    if not (matrix.diagonal() > 0).all():
        raise UserError(
            "a positive diagonal is needed, as of every positive definite A; got an entry below zero; negate A and b, "
            "or use scipy.sparse.linalg.minres"
        )


def _matrix(A: Any) -> sparse.csr_array:
    if isinstance(A, Tensor):
        A = A.detach().cpu()
        if A.layout != torch.strided:
            entries = A.to_sparse_coo().coalesce()
            rows, cols = entries.indices().numpy()
            A = sparse.coo_array((entries.values().double().numpy(), (rows, cols)), shape=tuple(A.shape))
        else:
            A = A.double().numpy()
    if isinstance(A, sparse_linalg.LinearOperator) or callable(A):
        raise UserError(
            "a matrix with its entries is needed for relaxation; got an operator; use solve_dcdm or scipy's cg"
        )
    found = A if sparse.issparse(A) else np.atleast_2d(np.asarray(A))
    if found.dtype.kind not in "biufc":
        raise UserError(
            f"a matrix of numbers is needed as A; got {type(A).__name__}; give an array, or a sparse matrix"
        )
    if np.issubdtype(found.dtype, np.complexfloating) or found.ndim != 2:
        raise UserError(f"a real matrix is needed; got {found.dtype} of shape {found.shape}; give A as a real matrix")
    matrix = sparse.csr_array(found, dtype=np.float64)
    matrix.sum_duplicates()
    return matrix


def _vector(values: Any) -> Array:
    array = real_array(values)
    return array.astype(np.float64).reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array.astype(np.float64)


def real_array(values: Any) -> Array:
    """Return b or x0 as an array; what is not real numbers raises `UserError`."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"real numbers are needed in b and x0; got {array.dtype}; solve for real and imaginary parts in turn, or "
            "use scipy.sparse.linalg"
        )
    return array


def back_like(b: Any) -> Callable[[Array], Any]:
    """Return what turns a solution into what b was."""
    if isinstance(b, Tensor):
        return lambda x: torch.from_numpy(x).to(b.device, like_dtype(b)).reshape(b.shape)
    given = np.asarray(b)
    return lambda x: x.reshape(given.shape).astype(given.dtype if given.dtype.kind == "f" else np.float64)


def like_dtype(b: Tensor) -> torch.dtype:
    """The dtype of solutions for a tensor b: its own, float64 for whole numbers."""
    return b.dtype if b.is_floating_point() else torch.float64


def scipy_atol(b: Any, rtol: float, atol: float) -> float:
    """Return max(atol, rtol · ‖b‖): what SciPy's solvers hold ‖b − A x‖ against, whatever x0 is."""
    return max(atol, rtol * float(np.linalg.norm(real_array(b).astype(np.float64))))


def scipy_callback(callback: Callable[[Any], Any] | None, x_of: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Return a callback that hands the user's one x after each step, as SciPy's solvers do."""
    if callback is None:
        return None
    return lambda moment: callback(x_of(moment.state)) if moment.nit else None


def as_result(run: LoopResult[Any], x: Any, counts: Mapping[str, int]) -> LinearResult:
    return LinearResult(
        x=x, fun=run.best_measured.residual, success=run.status.success, status=run.status, message=run.message,
        nit=run.nit, nfev=counts["matvecs"], history=run.history, residual_norm=run.best_measured.residual,
        num_matvecs=counts["matvecs"],
    )  # fmt: skip
