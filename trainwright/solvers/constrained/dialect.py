"""`minimize` with the arguments of `scipy.optimize.minimize`, on the sketched SQP method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, NonlinearConstraint
from torch import Tensor

from ...artifacts import UserError
from ..driver import Moment
from .ai_sqp import SqpOptions, solve_ai_sqp
from .ending import ConstrainedResult
from .problem import Array, EqualityProblem, NumpyProblem, SlackProblem, TorchProblem, back_like

METHODS = ("ai-sqp", "adasketch-newton")


@dataclass(frozen=True)
class _Piece:
    """Rows `signs · fun(x)[rows] − offsets`, to be zero, or ≥ 0 where `inequality`."""

    fun: Callable[[Any], Any]
    jac: Any
    hess: Any
    rows: Array
    signs: Array
    offsets: Array
    inequality: bool
    num_rows: int
    """Values that fun returns, all of them."""

    def values(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            signs, offsets = (torch.from_numpy(part).to(x.device) for part in (self.signs, self.offsets))
            found = self.fun(x)
            if not isinstance(found, Tensor):
                raise UserError(
                    f"constraints that return tensors are needed; got {type(found).__name__}; compute them with torch from x"
                )
            return signs * torch.atleast_1d(found).to(torch.float64)[torch.from_numpy(self.rows)] - offsets
        return self.signs * np.atleast_1d(np.asarray(self.fun(x), dtype=np.float64))[self.rows] - self.offsets

    def jacobian(self, x: Array) -> Array:
        found = np.atleast_2d(np.asarray(self.jac(x), dtype=np.float64))
        if found.shape != (self.num_rows, x.size):
            raise UserError(
                f"a constraint's jac of shape ({self.num_rows}, {x.size}) is needed, a row for each of its values; got "
                f"{found.shape}; check what it returns"
            )
        return self.signs[:, None] * found[self.rows]

    def hessian(self, x: Array, multipliers: Array, size: int) -> Array:
        weights = np.zeros(size)
        np.add.at(weights, self.rows, self.signs * multipliers)
        return np.asarray(self.hess(x, weights), dtype=np.float64)


def minimize(
    fun: Callable[..., Any], x0: Any, args: Any = (), jac: Callable[..., Any] | bool | None = None,
    hess: Callable[..., Any] | None = None, bounds: Any = None, constraints: Any = (), tol: float | None = None,
    callback: Callable[[Any], bool | None] | None = None, options: dict[str, Any] | None = None,
    method: str | None = None,
) -> ConstrainedResult:  # fmt: skip
    """Minimise f(x) subject to constraints and bounds, called as `scipy.optimize.minimize` is; the method is AI-SQP.

    x0 a tensor: `fun` and the constraints are torch functions, and derivatives come from autograd. x0 an array: NumPy
    functions with `jac` (True: fun returns value and gradient) and each constraint's `jac`; without every Hessian,
    differences of gradients stand in. constraints: dicts (`type` "eq" or "ineq", `fun`, `jac`, `args`), `LinearConstraint`,
    `NonlinearConstraint`, or a list. Inequalities and bounds become equalities by squared slacks; `multipliers` has a row
    for each equality, then one for each side of an inequality. `tol`: of the KKT residual, 1e-8 by default. `options`:
    `maxiter`, `max_seconds`, `seed`, and the fields of `SqpOptions`. `callback(x)` returning True or raising StopIteration
    stops. The result has SciPy's names; `success`, `status`, `message` as everywhere here. method: `ai-sqp`, or its other
    name `adasketch-newton`; there is no other one here.

    When not: see `solve_ai_sqp`; problems with many inequalities (squared slacks are no active-set method); gradients without a
    Hessian, of which each costs 2 n gradients here (SciPy's SLSQP needs none).

    >>> import torch
    >>> constraint = {"type": "eq", "fun": lambda x: x[0] * x[1] - 2}
    >>> result = minimize(lambda x: (x**2).sum(), torch.tensor([1.0, 3.0]), constraints=constraint)
    >>> result.success, [round(float(v), 4) for v in result.x]
    (True, [1.4142, 1.4142])
    """
    if method is not None and method.lower() not in METHODS:
        raise UserError(
            f"method {' or '.join(METHODS)} is needed; got {method!r}; leave it out, or use scipy.optimize.minimize"
        )
    settings = dict(options or {})
    maxiter, seed = settings.pop("maxiter", 1000), settings.pop("seed", 0)
    max_seconds, tol = settings.pop("max_seconds", None), 1e-8 if tol is None else tol
    args = args if isinstance(args, tuple) else (args,)
    if jac is True:
        fun, jac = _split(fun)
    pieces = _pieces(constraints, bounds, x0)
    inner = _problem(lambda x: fun(x, *args), _bound(jac, args), _bound(hess, args), pieces, x0)
    start = np.asarray(x0.detach().cpu() if isinstance(x0, Tensor) else x0, dtype=np.float64)
    size = start.size
    problem, first = _with_slacks(inner, pieces, start)

    def tell(moment: Moment[Any]) -> bool | None:
        return callback(back_like(x0, moment.state.x[:size])) if callback is not None else None

    result = solve_ai_sqp(
        problem, first, atol=tol, max_iterations=maxiter, max_seconds=max_seconds, options=_options(settings),
        seed=seed, callback=tell,
    )  # fmt: skip
    return replace(
        result, x=back_like(x0, result.x[:size]), jac=back_like(x0, result.jac[:size]),
        multipliers=back_like(x0, result.multipliers),
    )  # fmt: skip


def _split(fun: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the value and the gradient of a function that gives both; asked for both at one x, it is called once."""
    last: list[tuple[Any, Any]] = []

    def both(x: Any, *args: Any) -> Any:
        if not (last and not isinstance(x, Tensor) and np.array_equal(last[0][0], x)):
            found = fun(x, *args)
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise UserError(
                    f"fun that returns (value, gradient) is needed with jac=True; got {type(found).__name__}; return both"
                )
            last[:] = [(x if isinstance(x, Tensor) else np.array(x), found)]
        return last[0][1]

    return lambda x, *args: both(x, *args)[0], lambda x, *args: both(x, *args)[1]


def _with_slacks(inner: EqualityProblem, pieces: list[_Piece], start: Array) -> tuple[EqualityProblem, Array]:
    inequality = np.concatenate([np.full(piece.rows.size, piece.inequality) for piece in pieces] or [np.zeros(0, bool)])
    if not inequality.any():
        return inner, start
    slack = SlackProblem(inner, inequality, start.size)
    return slack, slack.start(start)


def _options(settings: dict[str, Any]) -> SqpOptions:
    known = [field.name for field in fields(SqpOptions)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise UserError(
            f"options of maxiter, max_seconds, seed, {', '.join(known)} are needed; got {unknown}; leave them out"
        )
    return SqpOptions(**settings)


def _problem(fun: Any, jac: Any, hess: Any, pieces: list[_Piece], x0: Any) -> EqualityProblem:
    if isinstance(x0, Tensor):

        def constraints(x: Tensor) -> Tensor:
            return torch.cat([piece.values(x) for piece in pieces]) if pieces else x[:0]

        return TorchProblem(fun, constraints, x0)
    if not callable(jac) or not all(callable(piece.jac) for piece in pieces):
        raise UserError(
            "derivatives are needed; got NumPy functions without jac; give jac for fun and for each constraint, or write "
            "them in torch and give x0 as a tensor"
        )
    exact = callable(hess) and all(callable(piece.hess) for piece in pieces)
    return NumpyProblem(
        fun, jac, lambda x: np.concatenate([piece.values(x) for piece in pieces]) if pieces else np.zeros(0),
        lambda x: np.vstack([piece.jacobian(x) for piece in pieces]) if pieces else np.zeros((0, x.size)),
        (lambda x, multipliers: _hessian(hess, pieces, x, multipliers)) if exact else None,
    )  # fmt: skip


def _hessian(hess: Any, pieces: list[_Piece], x: Array, multipliers: Array) -> Array:
    total, start = np.array(hess(x), dtype=np.float64), 0
    for piece in pieces:
        part = multipliers[start : start + piece.rows.size]
        total += piece.hessian(x, part, int(np.atleast_1d(piece.fun(x)).size))
        start += piece.rows.size
    return total


def _pieces(constraints: Any, bounds: Any, x0: Any) -> list[_Piece]:
    given: Sequence[Any] = constraints if isinstance(constraints, (list, tuple)) else [constraints]
    found = [piece for constraint in given for piece in _from_constraint(constraint, x0)]
    if bounds is not None:
        limits = bounds if isinstance(bounds, Bounds) else Bounds(*_ends(bounds, len(x0)))
        if any(np.size(end) not in (1, len(x0)) for end in (limits.lb, limits.ub)):
            raise UserError(
                f"bounds for {len(x0)} variables are needed; got {max(np.size(limits.lb), np.size(limits.ub))}; match them"
            )
        found += _from_constraint(LinearConstraint(np.eye(len(x0)), limits.lb, limits.ub), x0)
    return sorted(found, key=lambda piece: piece.inequality)


def _ends(bounds: Sequence[tuple[float | None, float | None]], size: int) -> tuple[Array, Array]:
    pairs = [isinstance(pair, Sequence | np.ndarray) and len(pair) == 2 for pair in bounds]
    if len(pairs) != size or not all(pairs):
        raise UserError(
            f"bounds as {size} pairs (low, high) are needed, one for each variable; got {len(pairs)} entries; "
            "None stands for no bound"
        )
    lows = np.array([-np.inf if low is None else low for low, _ in bounds], dtype=np.float64)
    return lows, np.array([np.inf if high is None else high for _, high in bounds], dtype=np.float64)


def _from_constraint(constraint: Any, x0: Any) -> list[_Piece]:
    if isinstance(constraint, dict):
        return [_from_dict(constraint, x0)]
    if isinstance(constraint, LinearConstraint):
        given = constraint.A.toarray() if sparse.issparse(constraint.A) else constraint.A
        matrix = np.atleast_2d(np.asarray(given, dtype=np.float64))
        return _from_interval(
            lambda x: torch.from_numpy(matrix).to(x.device) @ x if isinstance(x, Tensor) else matrix @ x,
            lambda x: matrix, lambda x, v: np.zeros((x.size, x.size)), constraint.lb, constraint.ub, matrix.shape[0],
        )  # fmt: skip
    if isinstance(constraint, NonlinearConstraint):
        num = _num_rows(constraint.fun, x0)
        return _from_interval(constraint.fun, constraint.jac, constraint.hess, constraint.lb, constraint.ub, num)
    raise UserError(
        f"a constraint as a dict, LinearConstraint or NonlinearConstraint is needed; got {type(constraint).__name__}; "
        "see scipy.optimize.minimize"
    )


def _from_dict(constraint: dict[str, Any], x0: Any) -> _Piece:
    kind = constraint.get("type")
    if kind not in ("eq", "ineq") or not callable(constraint.get("fun")):
        raise UserError(
            f"a constraint with type 'eq' or 'ineq' and fun is needed; got {sorted(constraint)}, type {kind!r}; add them"
        )
    args = constraint.get("args", ())
    fun = _bound(constraint["fun"], args)
    num = _num_rows(fun, x0)
    return _Piece(
        fun, _bound(constraint.get("jac"), args), constraint.get("hess"), np.arange(num), np.ones(num), np.zeros(num),
        kind == "ineq", num,
    )  # fmt: skip


def _from_interval(fun: Any, jac: Any, hess: Any, low: Any, high: Any, num: int) -> list[_Piece]:
    """Rows of low ≤ fun(x) ≤ high: equalities where the ends meet, else an inequality for each finite end."""
    lows, highs = (np.broadcast_to(np.asarray(end, dtype=np.float64), (num,)) for end in (low, high))
    if (lows > highs).any():
        row = int(np.flatnonzero(lows > highs)[0])
        raise UserError(
            f"low ≤ high is needed in each row; got {lows[row]:g} > {highs[row]:g} in row {row}; these constraints are infeasible"
        )
    equal = np.flatnonzero(lows == highs)
    above = np.flatnonzero((lows < highs) & np.isfinite(lows))
    below = np.flatnonzero((lows < highs) & np.isfinite(highs))
    parts = [(equal, 1.0, lows, False), (above, 1.0, lows, True), (below, -1.0, -highs, True)]
    return [
        _Piece(fun, jac, hess, rows, np.full(rows.size, sign), ends[rows], inequality, num)
        for rows, sign, ends, inequality in parts
        if rows.size
    ]  # fmt: skip


def _num_rows(fun: Any, x0: Any) -> int:
    value = fun(x0.detach().to(torch.float64)) if isinstance(x0, Tensor) else fun(np.asarray(x0, dtype=np.float64))
    return int(value.numel()) if isinstance(value, Tensor) else int(np.size(value))


def _bound(function: Any, args: tuple[Any, ...]) -> Any:
    return (lambda x: function(x, *args)) if callable(function) and args else function
