"""Equality-constrained problems, min f(x) subject to c(x) = 0, as the methods read them: values and derivatives.

Three ways to one: from torch functions (derivatives by autograd), from NumPy functions with their derivatives
(`NumpyProblem`), and from inequalities by squared slacks (`with_slacks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Counts

Array = np.ndarray


@dataclass(frozen=True)
class Values:
    """At one x of shape (n,): f, its gradient (n,), c (m,) and the Jacobian of c (m, n), all in float64."""

    fun: float
    gradient: Array
    constraints: Array
    jacobian: Array

    def lagrangian_gradient(self, multipliers: Array) -> Array:
        return self.gradient + self.jacobian.T @ multipliers

    @property
    def finite(self) -> bool:
        parts = (self.gradient, self.constraints, self.jacobian)
        return bool(np.isfinite(self.fun) and all(np.isfinite(part).all() for part in parts))


class EqualityProblem(Protocol):
    """What a method asks: `values(x)`, and `hessian(x, λ)` = ∇²f + Σ λ_i ∇²c_i of shape (n, n). They count themselves."""

    counts: Counts

    def values(self, x: Array) -> Values: ...

    def hessian(self, x: Array, multipliers: Array) -> Array: ...


class TorchProblem:
    """f and c as torch functions of x (n,): f returns a number, c a vector (m,); derivatives are autograd's."""

    def __init__(
        self, fun: Callable[[Tensor], Tensor], constraints: Callable[[Tensor], Tensor], like: Tensor | None = None
    ) -> None:
        self.counts = Counts()
        self._device = like.device if like is not None else torch.device("cpu")
        self._fun, self._constraints = fun, constraints
        self._gradient = torch.func.grad_and_value(self._scalar)
        self._jacobian = torch.func.jacrev(lambda x: (self._vector(x), self._vector(x)), has_aux=True)
        self._hessian = torch.func.jacrev(torch.func.grad(self._lagrangian))

    def values(self, x: Array) -> Values:
        self.counts.add(nfev=1, njev=1)
        point = self._tensor(x)
        gradient, fun = self._gradient(point)
        jacobian, constraints = self._jacobian(point)
        return Values(float(fun), _array(gradient), _array(constraints), _array(jacobian))

    def hessian(self, x: Array, multipliers: Array) -> Array:
        self.counts.add(nhev=1)
        return _array(self._hessian(self._tensor(x), self._tensor(multipliers)))

    def _lagrangian(self, x: Tensor, multipliers: Tensor) -> Tensor:
        return self._scalar(x) + multipliers @ self._vector(x)

    def _scalar(self, x: Tensor) -> Tensor:
        value = _called(self._fun, x)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"fun must return one number as a tensor; got {shape}; sum it, and compute it with torch from x"
            )
        return value.reshape(()).to(torch.float64)

    def _vector(self, x: Tensor) -> Tensor:
        value = _called(self._constraints, x)
        if not isinstance(value, Tensor):
            raise UserError(
                f"constraints must return a tensor; got {type(value).__name__}; compute them with torch from x"
            )
        return value.reshape(-1).to(torch.float64)

    def _tensor(self, x: Array) -> Tensor:
        return torch.from_numpy(x).to(self._device)


def _called(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return function(x)
    except RuntimeError as error:
        if "dtype" not in str(error) and "scalar type" not in str(error):
            raise
        raise UserError(
            f"functions of a float64 x are needed, whatever x0 is; got: {error}; convert their constants with .double()"
        ) from error


def back_like(x0: Any, values: Array) -> Any:
    """Return a vector in float64 as x0 was: a tensor on its device, or an array."""
    return torch.from_numpy(np.array(values)).to(x0.device) if isinstance(x0, Tensor) else values


class NumpyProblem:
    """f and c with their derivatives as NumPy functions; without `hess`, ∇²L by central differences of ∇L.

    fun(x) → number, jac(x) → (n,), constraints(x) → (m,), constraints_jac(x) → (m, n), hess(x, λ) → (n, n) of the
    Lagrangian. The differences cost 2 n gradients a Hessian, and leave about eight correct digits.
    """

    def __init__(
        self, fun: Callable[[Array], float], jac: Callable[[Array], Array], constraints: Callable[[Array], Array],
        constraints_jac: Callable[[Array], Array], hess: Callable[[Array, Array], Array] | None = None,
    ) -> None:  # fmt: skip
        self.counts = Counts()
        self._fun, self._jac, self._constraints, self._constraints_jac = fun, jac, constraints, constraints_jac
        self._hess = hess

    def values(self, x: Array) -> Values:
        self.counts.add(nfev=1, njev=1)
        fun = np.asarray(self._fun(x), dtype=np.float64)
        if fun.size != 1:
            raise UserError(f"fun that returns one number is needed; got shape {fun.shape}; sum it")
        constraints = np.atleast_1d(np.asarray(self._constraints(x), dtype=np.float64)).reshape(-1)
        jacobian = np.atleast_2d(np.asarray(self._constraints_jac(x), dtype=np.float64))
        gradient = np.asarray(self._jac(x), dtype=np.float64).reshape(-1)
        if gradient.size != x.size or jacobian.shape != (constraints.size, x.size):
            raise UserError(
                f"jac of shape ({x.size},) and constraint rows ({constraints.size}, {x.size}) are needed; "
                f"got {gradient.shape} and {jacobian.shape}; check what the derivatives return"
            )
        return Values(float(fun.reshape(())), gradient, constraints, jacobian)

    def hessian(self, x: Array, multipliers: Array) -> Array:
        self.counts.add(nhev=1)
        if self._hess is not None:
            found = np.asarray(self._hess(x, multipliers), dtype=np.float64)
            if found.shape != (x.size, x.size):
                raise UserError(
                    f"hess of shape ({x.size}, {x.size}) is needed; got {found.shape}; check it, or leave it out"
                )
            return found
        steps = np.cbrt(np.finfo(np.float64).eps) * np.maximum(1.0, np.abs(x))
        columns = []
        for i, step in enumerate(steps):
            shift = np.zeros_like(x)
            shift[i] = step
            ahead, behind = (self.values(x + sign * shift).lagrangian_gradient(multipliers) for sign in (1, -1))
            columns.append((ahead - behind) / (2 * step))
        matrix = np.stack(columns, 1)
        return (matrix + matrix.T) / 2


class SlackProblem:
    """Rows of c that are to be ≥ 0 become c_i(x) − s_i² = 0 in (x, s); the rest stay equalities.

    The simplest smooth reformulation: at an inequality that is inactive with multiplier zero, or active with multiplier
    zero, the Hessian in s is singular, and convergence slows there.
    """

    def __init__(self, problem: EqualityProblem, inequalities: Array, num_variables: int) -> None:
        self.inner, self.counts = problem, problem.counts
        self.rows = np.flatnonzero(inequalities)
        self.num_variables = num_variables

    def start(self, x: Array) -> Array:
        """Return (x, s) with s as the constraints are at x, and not at s = 0, where its gradient vanishes."""
        slack = np.sqrt(np.maximum(self.inner.values(x).constraints[self.rows], 0.1))
        return np.concatenate([x, slack])

    def values(self, x: Array) -> Values:
        inner, slack = self.inner.values(x[: self.num_variables]), x[self.num_variables :]
        constraints = inner.constraints.copy()
        constraints[self.rows] -= slack**2
        columns = np.zeros((constraints.size, slack.size))
        columns[self.rows, np.arange(slack.size)] = -2 * slack
        gradient = np.concatenate([inner.gradient, np.zeros(slack.size)])
        return Values(inner.fun, gradient, constraints, np.hstack([inner.jacobian, columns]))

    def hessian(self, x: Array, multipliers: Array) -> Array:
        inner = self.inner.hessian(x[: self.num_variables], multipliers)
        matrix = np.diag(np.concatenate([np.zeros(self.num_variables), -2 * multipliers[self.rows]]))
        matrix[: self.num_variables, : self.num_variables] = inner
        return matrix


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().cpu().numpy(), dtype=np.float64)
