"""The deep conjugate direction method: conjugate directions that come from a model instead of the residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Callback, Counts, Ended, Limits, Measured, drive
from ..outcome import Status
from .grid import as_product
from .system import LinearResult, as_result, back_like, like_dtype, real_array, scipy_atol, scipy_callback


@dataclass(frozen=True)
class _Direction:
    """p, A p and pᵀA p."""

    direction: Tensor
    image: Tensor
    curvature: float


@dataclass(frozen=True)
class _Iterate:
    x: Tensor
    residual: Tensor
    previous: tuple[_Direction, ...] = ()


def solve_dcdm(
    A: Any, b: Any, model: Callable[[Tensor], Tensor], x0: Any = None, *, rtol: float = 1e-6, atol: float = 0.0,
    max_iterations: int = 100, max_evaluations: int | None = None, max_seconds: float | None = None,
    num_previous: int = 2, project: Callable[[Tensor], Tensor] | None = None, callback: Callback | None = None,
    keep_history: bool = False, progress: Callable[[str], None] | None = None,
) -> LinearResult:  # fmt: skip
    """Solve A x = b, A symmetric positive definite, along directions model(r/‖r‖) made A-orthogonal to the last ones.

        d ← model(r/‖r‖);  d ← d − p (d·Ap)/(p·Ap) for the `num_previous` last directions p;
        x ← x + d (d·r)/(d·Ad);  r ← b − A x

    A: a function on tensors of b's shape (`PoissonGrid.apply`), a `LinearOperator` or a matrix on flattened ones. b: a
    tensor or array in the grid's shape. model: a residual of unit norm to a direction of the same shape and any length
    (`DirectionNet.direction`). It stops at ‖b − A x‖ ≤ max(atol, rtol · ‖b − A x0‖). Recurrences are float64 on b's
    device, the residual is computed anew each iteration, so that a model in float32 does not limit the accuracy.
    project: takes out A's null space where it is singular (`PoissonGrid.project`). An iteration costs a model call and two
    products with A. With the identity as model it is the conjugate gradient method, iteration by iteration.

    When not: without many systems to repay the training; where multigrid applies (PyAMG solves Poisson problems on a CPU more
    than ten times faster). The count of iterations has no bound in theory: a network trained on cubes of 15 to 40
    a side, odd and even, needed 19 iterations on 48³ and 72 on 101³; one that met even sides alone failed there.
    Orthogonalising helps a trained model by an iteration or two in ten, against `num_previous=0`.

    Errors: `UserError` for shapes that do not fit or numbers that are not finite. A direction of no curvature ends as
    BREAKDOWN, one that is not finite as NOT_FINITE, with the best iterate.

    >>> from trainwright.solvers.linear import PoissonGrid
    >>> grid = PoissonGrid((8, 8))
    >>> result = solve_dcdm(grid.apply, torch.ones(8, 8), lambda r: r)
    >>> result.success, result.nit, tuple(result.x.shape)
    (True, 10, (8, 8))

    Source: Kaneda et al., *A Deep Conjugate Direction Method for Iteratively Solving Linear Systems*, ICML 2023.
    Departure: the coefficients come one after another (modified Gram-Schmidt), which is safer in finite precision.
    """
    right = _grid_tensor(b, "b")
    start = torch.zeros_like(right) if x0 is None else _grid_tensor(x0, "x0").to(right.device)
    if start.shape != right.shape:
        raise UserError(
            f"x0 of b's shape {tuple(right.shape)} is needed; got {tuple(start.shape)}; leave it out for zero"
        )
    method = _Dcdm(as_product(A, right.shape), right, model, num_previous, project or (lambda r: r))
    run = drive(
        method.at(start, ()), method.step, _measure, Limits(max_iterations, rtol, atol, max_evaluations, max_seconds),
        counts=method.counts, callback=callback, keep_history=keep_history, progress=progress,
    )  # fmt: skip
    return as_result(run, _like(b, run.best.x), method.counts)


def dcdm(
    A: Any, b: Any, x0: Any = None, *, model: Callable[[Tensor], Tensor], rtol: float = 1e-6, atol: float = 0.0,
    maxiter: int = 100, callback: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:  # fmt: skip
    """Return (x, info) of `solve_dcdm` as `scipy.sparse.linalg.cg` does: info 0 is solved, > 0 not yet, < 0 broken down.

    As there, it stops at ‖b − A x‖ ≤ max(atol, rtol · ‖b‖), and `callback(x)` follows each step.

    >>> dcdm(np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([1.0, 1.0]), model=lambda r: r)[1]
    0
    """
    result = solve_dcdm(
        A, b, model, x0, rtol=0.0, atol=scipy_atol(b, rtol, atol), max_iterations=maxiter,
        callback=scipy_callback(callback, lambda state: _like(b, state.x)),
    )  # fmt: skip
    return result.x, result.info


class _Dcdm:
    def __init__(
        self, product: Callable[[Tensor], Tensor], right: Tensor, model: Callable[[Tensor], Tensor], num_previous: int,
        project: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        model = getattr(model, "direction", model)  # of a `DirectionNet`
        if not callable(model):
            raise UserError(f"a model, residual to direction, is needed; got {type(model).__name__}; try net.direction")
        if num_previous < 0:
            raise UserError(f"num_previous ≥ 0 is needed; got {num_previous}; the paper uses 2")
        self.product, self.model, self.num_previous, self.project = product, model, num_previous, project
        self.right = project(right)
        self.counts = Counts()

    def at(self, x: Tensor, previous: tuple[_Direction, ...]) -> _Iterate:
        self.counts.add(matvecs=1, nfev=1)
        image = self.product(x)
        if not isinstance(image, Tensor) or image.shape != x.shape:
            found = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise UserError(
                f"products as tensors of shape {tuple(x.shape)} are needed; A gave {found}; reshape in A, or give a LinearOperator"
            )
        return _Iterate(x, self.project(self.right - image), previous)

    def step(self, state: _Iterate) -> _Iterate:
        direction = self._direction(state)
        image = self.product(direction)
        self.counts.add(matvecs=1, nfev=1)
        curvature = float((direction * image).sum())
        if not curvature > 0:
            raise Ended(Status.BREAKDOWN)
        length = float((direction * state.residual).sum()) / curvature
        newest = _Direction(direction, image, curvature)
        return self.at(state.x + length * direction, (newest, *state.previous)[: self.num_previous])

    def _direction(self, state: _Iterate) -> Tensor:
        direction = self.model(state.residual / state.residual.norm())
        if not isinstance(direction, Tensor) or direction.shape != state.x.shape:
            shape = tuple(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
            raise UserError(
                f"a model that keeps the shape {tuple(state.x.shape)} is needed; it gave {shape}; reshape its output"
            )
        direction = self.project(direction.to(state.x.dtype))
        if not bool(torch.isfinite(direction).all()):
            raise Ended(Status.NOT_FINITE)
        for earlier in state.previous:
            weight = float((direction * earlier.image).sum()) / earlier.curvature
            direction = direction - weight * earlier.direction
        return direction


def _measure(state: _Iterate) -> Measured:
    size = float(state.residual.norm())
    return Measured(size, fun=size)


def _like(b: Any, x: Tensor) -> Any:
    """Return a solution as b was, tensor or array, of its dtype."""
    return x.to(like_dtype(b)) if isinstance(b, Tensor) else back_like(b)(x.numpy())


def _grid_tensor(values: Any, name: str) -> Tensor:
    tensor = values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.array(real_array(values)))
    if tensor.is_complex():
        raise UserError(f"real numbers are needed in {name}; got {tensor.dtype}; solve for both parts in turn")
    tensor = tensor.to(torch.float64)
    if tensor.numel() == 0 or not bool(torch.isfinite(tensor).all()):
        raise UserError(
            f"finite numbers are needed in {name}; got shape {tuple(tensor.shape)} with NaN or infinity; check it"
        )
    return tensor
