"""Adaptive inexact SQP (AdaSketch-Newton): Newton-KKT systems solved by sketching, an exact augmented Lagrangian as merit.

merit  ℒ_η(x, λ) = f + λᵀc + η₁/2 ‖c‖² + η₂/2 ‖∇ₓL‖²                           `Point.merit`
its gradient (∇ₓL + η₂ ∇²L ∇ₓL + η₁ Gᵀc,  c + η₂ G ∇ₓL)                        `Point.merit_gradient`
K z = −(∇ₓL, c),  K = [[B, Gᵀ], [G, 0]], until ‖K‖ Ψ ‖r‖ ≤ θₖ δ ‖(∇ₓL, c)‖      `_AiSqp._direction`
θₖ = θ (‖(∇ₓL, c)‖ / ‖(∇ₓL, c)‖ at the start)^forcing                            `_AiSqp._theta`
η and δ adapted until z descends by η₂/2 ‖(∇ₓL, c)‖²                            `_AiSqp._direction`
Armijo backtracking on ℒ_η                                                       `_AiSqp._search`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
from scipy import linalg
from torch import Tensor

from ...artifacts import UserError
from ...numerics.linesearch import armijo
from ..driver import Callback, Ended, Limits, LoopResult, Measured, drive
from ..outcome import Status
from ..seeds import as_numpy_generator
from .ending import ConstrainedResult, message, only_violation_is_left, why_dependent
from .problem import EqualityProblem, TorchProblem, Values, back_like
from .sketch import Sketch, SketchedSystem

Array = np.ndarray
CURVATURE = 1e-6
RANK = 1e-12
PENALTY_LIMITS = (1e8, 1e-8)
SMALLEST_STEP = 1e-10
ROUNDING = 1e-14


@dataclass(frozen=True)
class SqpOptions:
    """The method's constants, by the authors' names; the defaults are those of their code, but for `sketch` and `forcing`.

    sketch: "exact" (a direct solution: K is in memory, and factorising it costs less than the rows of a sketch did in every
    problem measured), "kaczmarz" (a row of K a step) or "gaussian". size: rows a sketch.
    theta: how exactly the systems are solved. forcing: above 0, θ falls with the residual to this power, and the end is
    superlinear also where steps are inexact. psi_scale, delta_min: with 1 and 1e-6 the tolerance is so small that steps are
    nearly exact Newton steps; a psi_scale of 1e-8 makes them inexact. max_sketches: a Newton system's limit.
    """

    sketch: Sketch = "exact"
    size: int = 1
    eta1: float = 1.0
    eta2: float = 0.1
    delta: float = 0.1
    beta: float = 0.1
    nu: float = 1.5
    xi_b: float = 0.1
    theta: float = 1.0
    forcing: float = 0.0
    psi_scale: float = 1.0
    delta_min: float = 1e-6
    max_sketches: int = 100_000

    def __post_init__(self) -> None:
        if self.sketch not in get_args(Sketch):
            raise UserError(f"a sketch of {get_args(Sketch)} is needed; got {self.sketch!r}; the default is 'exact'")
        positive = ("size", "eta1", "eta2", "delta", "xi_b", "theta", "psi_scale", "delta_min", "max_sketches")
        wrong = [name for name in positive if not getattr(self, name) > 0]
        if wrong or not self.nu > 1 or not 0 < self.beta < 0.5 or not self.forcing >= 0:
            raise UserError(
                "positive constants, nu > 1, 0 < beta < 0.5 and forcing of at least 0 are needed; got "
                f"{wrong or (self.nu, self.beta, self.forcing)}; "
                "leave them at the defaults"
            )


@dataclass(frozen=True)
class Point:
    """x, λ with the values there, and the method's parameters as they stand."""

    x: Array
    multipliers: Array
    values: Values
    problem: EqualityProblem
    eta1: float
    eta2: float
    delta: float
    step_size: float = float("nan")

    @cached_property
    def gradient(self) -> Array:
        """∇ₓL."""
        return self.values.lagrangian_gradient(self.multipliers)

    @cached_property
    def hessian(self) -> Array:
        return self.problem.hessian(self.x, self.multipliers)

    @property
    def kkt(self) -> Array:
        """(∇ₓL, c): zero at a solution."""
        return np.concatenate([self.gradient, self.values.constraints])

    def merit(self) -> float:
        c, gradient = self.values.constraints, self.gradient
        penalty = self.eta1 / 2 * c @ c + self.eta2 / 2 * gradient @ gradient
        return float(self.values.fun + self.multipliers @ c + penalty)

    def merit_gradient(self) -> Array:
        """With ∇²L, not ∇²f, in the first part: only so it is the merit's gradient where c is not linear."""
        c, jacobian = self.values.constraints, self.values.jacobian
        in_x = self.gradient + self.eta2 * self.hessian @ self.gradient + self.eta1 * jacobian.T @ c
        return np.concatenate([in_x, c + self.eta2 * jacobian @ self.gradient])

    def adapted(self, **parameters: Any) -> Point:
        """Return the same point with other parameters; what is known of it is not computed again."""
        other = replace(self, **parameters)
        other.__dict__.update({name: self.__dict__[name] for name in ("gradient", "hessian") if name in self.__dict__})
        return other

    def moved(self, step: Array, length: float) -> Point:
        x = self.x + length * step[: self.x.size]
        multipliers = self.multipliers + length * step[self.x.size :]
        values = self.problem.values(x)
        return Point(x, multipliers, values, self.problem, self.eta1, self.eta2, self.delta, length)


def solve_ai_sqp(
    fun: Callable[[Tensor], Tensor] | EqualityProblem, x0: Any, constraints: Callable[[Tensor], Tensor] | None = None, *,
    multipliers: Any = None, rtol: float = 0.0, atol: float = 1e-8, max_iterations: int = 1000,
    max_evaluations: int | None = None, max_seconds: float | None = None, options: SqpOptions | None = None,
    seed: int | np.random.Generator = 0, callback: Callback | None = None, keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ConstrainedResult:  # fmt: skip
    """Minimise f(x) subject to c(x) = 0 by Newton steps on the KKT conditions, under an exact augmented Lagrangian.

    By default each Newton system is solved directly; by sketches (`SqpOptions(sketch="kaczmarz")`) only as well as is needed.

    fun, constraints: torch functions of x (n,), to a number and to a vector (m,); derivatives come from autograd. Or an
    `EqualityProblem` as `fun` (NumPy functions: `NumpyProblem`). x0: a vector, array or tensor; float64 inside and in what
    the functions see, `x` comes back as x0 was, in float64. multipliers: λ at the start (zeros). It stops at ‖(∇ₓL, c)‖ ≤
    max(atol, rtol · that at the start). `max_evaluations` limits values of f and c. `seed`: a number or a NumPy generator,
    for the sketches.

    When not: SciPy's SLSQP is quicker on problems of a few variables, trust-constr more robust from hard starts. The Hessian
    is formed (n × n) and factorised. Of sketches: one reads a row of K in O(n + m), but needs about cond(K)² log(1/ε) of
    them; with ill-conditioned systems (κ above 10³) the limit `max_sketches` comes first, and larger blocks (`size`) need fewer.
    Inequalities and bounds: `minimize`, by squared slacks.

    Errors: `UserError` for shapes and constants; constraints whose gradients are dependent end as BREAKDOWN, as INFEASIBLE
    where no step meets them to first order or nothing but their violation is left to lower, values that are not finite as
    NOT_FINITE, all with the best iterate so far.

    >>> result = solve_ai_sqp(lambda x: x.square().sum(), [3.0, 1.0], lambda x: x[:1] + x[1:] - 1)
    >>> result.success, [round(float(v), 6) for v in result.x], round(float(result.multipliers[0]), 6)
    (True, [0.5, 0.5], -1.0)

    Source: Hong, Na, Mahoney & Kolar, *Constrained Optimization via Exact Augmented Lagrangian and Randomized Iterative
    Sketching*, ICML 2023. Departures: ∇²L in the merit's gradient (the authors' code has ∇²f, which is not its gradient
    where c is not linear); the first residual has the right sign.
    """
    start_x, back = _vector(x0)
    if callable(fun):
        problem: EqualityProblem = TorchProblem(
            fun, constraints or (lambda x: x[:0]), x0 if isinstance(x0, Tensor) else None
        )
    else:
        problem = fun
    method = _AiSqp(problem, options or SqpOptions(), as_numpy_generator(seed))
    run = drive(
        method.start(start_x, multipliers), method.step, _measure,
        Limits(max_iterations, rtol=rtol, atol=atol, max_evaluations=max_evaluations, max_seconds=max_seconds),
        counts=problem.counts, callback=callback, keep_history=keep_history, progress=progress,
    )  # fmt: skip
    return _result(run, method, back)


solve_adasketch_newton = solve_ai_sqp
"""The name in the authors' repository."""


class _AiSqp:
    def __init__(self, problem: EqualityProblem, options: SqpOptions, random: np.random.Generator) -> None:
        self.problem, self.options, self.random = problem, options, random
        self.num_capped = 0
        self.first_residual = 0.0

    def start(self, x: Array, multipliers: Any) -> Point:
        values = self.problem.values(x)
        num = values.constraints.size
        if num > x.size:
            raise UserError(
                f"at most as many constraints as variables are needed; got {num} for {x.size}; leave some out"
            )
        first = np.zeros(num) if multipliers is None else _vector(multipliers)[0]
        if first.shape != (num,):
            raise UserError(f"multipliers of shape ({num},) are needed; got {first.shape}; leave them out for zeros")
        o = self.options
        point = Point(x, first, values, self.problem, o.eta1, o.eta2, o.delta)
        self.first_residual = float(np.linalg.norm(point.kkt))
        return point

    def step(self, point: Point) -> Point:
        if not np.isfinite(point.hessian).all():
            raise Ended(Status.NOT_FINITE)
        point, direction = self._direction(point)
        return self._search(point, direction)

    def _direction(self, point: Point) -> tuple[Point, Array]:
        """Sketch on, with larger η₁ and smaller η₂, δ, until the direction descends on the merit."""
        o, kkt = self.options, point.kkt
        model, least_g = self._model(point)
        size = float(np.linalg.norm(model))
        psi = o.psi_scale * 20 * max(size**2, 1.0) / (min(least_g, 1.0) * min(o.xi_b, 1.0))
        point = point.adapted(delta=self._delta(point, point.delta, psi))
        system = self._system(point, model)
        spread = system.norm * psi
        spent = 0
        while True:
            spent += o.max_sketches
            residual = float(np.linalg.norm(kkt))
            met = system.advance(self._theta(residual) * point.delta * residual / spread, spent)
            descent = float(point.merit_gradient() @ system.z)
            if descent <= -point.eta2 / 2 * float(kkt @ kkt) or self._penalties_are_spent(point):
                break
            point = self._harder(point, psi)
        self.problem.counts.add(num_sketches=system.num_steps)
        self.num_capped += not met
        return point, system.z

    def _theta(self, residual: float) -> float:
        return self.options.theta * min(1.0, residual / max(self.first_residual, 1e-300)) ** self.options.forcing

    def _model(self, point: Point) -> tuple[Array, float]:
        """Return B, the Hessian shifted where it has no positive curvature along the constraints, and λ_min(GGᵀ)."""
        jacobian, hessian = point.values.jacobian, point.hessian
        if jacobian.shape[0] == 0:
            least_g, null = 1.0, np.eye(point.x.size)
        else:
            least_g = float(np.linalg.eigvalsh(jacobian @ jacobian.T)[0])
            if least_g <= RANK * max(float(np.linalg.norm(jacobian)) ** 2, 1e-300):
                raise Ended(why_dependent(point.values))
            null = linalg.qr(jacobian.T, mode="full")[0][:, jacobian.shape[0] :]
        reduced = null.T @ hessian @ null
        if reduced.size and np.linalg.eigvalsh(reduced)[0] < CURVATURE:
            return hessian + (self.options.xi_b + float(np.linalg.norm(hessian))) * np.eye(point.x.size), least_g
        return hessian, least_g

    def _system(self, point: Point, model: Array) -> SketchedSystem:
        jacobian = point.values.jacobian
        zero = np.zeros((jacobian.shape[0], jacobian.shape[0]))
        matrix = np.block([[model, jacobian.T], [jacobian, zero]])
        return SketchedSystem(matrix, -point.kkt, self.options.sketch, self.options.size, self.random)

    def _delta(self, point: Point, delta: float, psi: float) -> float:
        o = self.options
        upsilon = max(float(np.linalg.norm(point.values.jacobian)), float(np.linalg.norm(point.hessian)), 1.0)
        trial = (0.5 - o.beta) * point.eta2 / ((1 + point.eta1 + point.eta2) * upsilon**2 * psi**2)
        return max(min(delta, trial), o.delta_min)

    def _harder(self, point: Point, psi: float) -> Point:
        nu = self.options.nu
        harder = point.adapted(eta1=point.eta1 * nu**2, eta2=point.eta2 / nu)
        return harder.adapted(delta=self._delta(harder, harder.delta / nu**4, psi))

    def _penalties_are_spent(self, point: Point) -> bool:
        return point.eta1 > PENALTY_LIMITS[0] or point.eta2 < PENALTY_LIMITS[1]

    def _search(self, point: Point, direction: Array) -> Point:
        slope = float(point.merit_gradient() @ direction)
        if not slope < 0:
            raise Ended(Status.STALLED)
        value = point.merit()
        # Rounding of f hides the last digits of the penalties: within it a step counts as no rise.
        slack = ROUNDING * (abs(point.values.fun) + abs(float(point.multipliers @ point.values.constraints)) + 1e-300)
        trials: dict[float, Point] = {}

        def merit_at(length: float) -> float:
            trials[length] = point.moved(direction, length)
            return trials[length].merit() if trials[length].values.finite else float("nan")

        found = armijo(
            merit_at, value + slack, slope, step=1.0, sufficient=self.options.beta, min_step=SMALLEST_STEP
        )  # fmt: skip
        if not found.accepted:
            raise Ended(Status.STALLED)
        return trials[found.step]


def _measure(point: Point) -> Measured:
    if not point.values.finite:
        return Measured(float("inf"))
    extra = {"step_size": point.step_size, "eta1": point.eta1, "eta2": point.eta2, "delta": point.delta}
    return Measured(float(np.linalg.norm(point.kkt)), point.values.fun, extra)


def _vector(values: Any) -> tuple[Array, Callable[[Array], Any]]:
    """Return a float64 vector, and what turns one like it into the kind that was given."""
    array = np.array(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise UserError(
            f"a vector of finite numbers is needed as a start; got shape {array.shape}; flatten it, check for NaN"
        )
    return array, lambda x: back_like(values, x)


def _result(run: LoopResult[Point], method: _AiSqp, back: Callable[[Array], Any]) -> ConstrainedResult:
    best, counts = run.best, run.counts
    c = best.values.constraints
    status = run.status
    if status in (Status.STALLED, Status.MAX_ITERATIONS, Status.DIVERGED) and only_violation_is_left(run.last.values):
        status = Status.INFEASIBLE
    return ConstrainedResult(
        x=back(best.x), fun=best.values.fun, success=status.success, status=status,
        message=message(status, method.num_capped, best.values), nit=run.nit, nfev=counts["nfev"], history=run.history,
        multipliers=back(best.multipliers), jac=back(best.values.gradient), kkt_residual=run.best_measured.residual,
        constr_violation=float(np.abs(c).max()) if c.size else 0.0, njev=counts["njev"], nhev=counts["nhev"],
        num_sketches=counts["num_sketches"], num_capped=method.num_capped,
    )  # fmt: skip
