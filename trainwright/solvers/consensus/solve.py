"""`minimize`: values of batches of points in, a frozen result out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Callback, Counts, Limits, Measured, drive
from ..outcome import Result
from .box import Box
from .cbo import CBO
from .ensemble import Ensemble, Method, check_values
from .swarm import begin


@dataclass(frozen=True)
class ConsensusResult(Result):
    """A `Result` whose `x` is the last consensus point; `best_x`, `best_fun`: the best point evaluated on the way."""

    best_x: Any
    best_fun: float
    spread: float


def minimize(
    fun: Callable[[Any], Any],
    bounds: Any = None,
    *,
    x0: Any = None,
    spread: float | None = None,
    method: Method | None = None,
    num_particles: int = 100,
    max_iterations: int = 1000,
    rtol: float = 0.0,
    atol: float = 0.0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    vectorized: bool = True,
    seed: int | torch.Generator = 0,
    callback: Callback | None = None,
    keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ConsensusResult:
    """Find a global minimum of E: ℝᵈ → ℝ from values alone, min E(x) over the box.

    `fun`: (N, d) → (N,); with `vectorized=False` (d,) → number. `bounds`: pairs (low, high), `None` or ±inf where there is none, or
    scipy's `Bounds`; particles stay inside. The first particles are uniform in the box, or normal around `x0` (d,) with standard
    deviation `spread`. Points have `x0`'s type; they are NumPy arrays where `x0` or `bounds` are, else tensors
    (float64 where nothing says otherwise). `method`: `CBO()` by default, or `ConsensusHopping`.

    `num_particles` N evaluations a step, and one at the end. The run ends after `max_iterations` steps, or where the spread of the
    ensemble is at most `atol`, or `rtol` times what it was (`CBO` only). A value that is not finite counts as +∞; where all
    are, the run ends NOT_FINITE. Raises `UserError` for bounds or values that are not as described.

    Not where gradients are at hand and one valley is enough: any descent method needs far fewer evaluations.

    >>> def rastrigin(x):
    ...     return (x**2 - 10 * torch.cos(2 * torch.pi * x) + 10).sum(1)
    >>> result = minimize(rastrigin, [(-3.0, 5.0)] * 2, max_iterations=500, rtol=1e-3, seed=0)
    >>> result.status.name, bool(result.x.abs().max() < 0.05)
    ('CONVERGED', True)
    """
    method = method if method is not None else CBO()
    box, generator, particles = begin(bounds, x0, spread, method, num_particles, seed)
    if not method.has_residual and (rtol > 0 or atol > 0):
        raise UserError(f"CBO is needed for a tolerance; got {type(method).__name__}; limit its iterations instead")
    counts = Counts(nfev=0)

    def evaluate(points: Tensor) -> Tensor:
        counts.add(nfev=len(points))
        return _values(fun, points, box, vectorized)

    def step(ensemble: Ensemble) -> Ensemble:
        points = box.inside(method.propose(ensemble, generator))
        return Ensemble.of(points, evaluate(points), method.alpha, ensemble)

    def measure(ensemble: Ensemble) -> Measured:
        return Measured(method.residual(ensemble), float(ensemble.values.min()), {"best_fun": ensemble.best_fun})

    limits = Limits(max_iterations, rtol=rtol, atol=atol, max_evaluations=max_evaluations, max_seconds=max_seconds)
    first = Ensemble.of(particles, evaluate(particles), method.alpha, None)
    run = drive(first, step, measure, limits,
                counts=counts, callback=callback, keep_history=keep_history, progress=progress)  # fmt: skip
    last = run.last
    value = float(evaluate(last.consensus[None])[0])
    best_x, best_fun = (last.consensus, value) if value < last.best_fun else (last.best_x, last.best_fun)
    return ConsensusResult(
        x=_like(last.consensus, box),
        fun=value,
        best_x=_like(best_x, box),
        best_fun=best_fun,
        spread=last.spread,
        success=run.status.success,
        status=run.status,
        message=run.message,
        nit=run.nit,
        nfev=counts["nfev"],
        history=run.history,
    )


def _values(fun: Callable[[Any], Any], points: Tensor, box: Box, vectorized: bool) -> Tensor:
    given = _like(points.clone(), box)  # fun may write to it
    with torch.no_grad():
        values = fun(given) if vectorized else [_number(fun(point)) for point in given]
    if not isinstance(values, Tensor):
        try:
            values = torch.from_numpy(np.array(values, dtype=np.float64))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"fun that returns numbers is needed; got {type(values).__name__}: {error}; return one a row"
            ) from error
    return check_values(values, points)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"fun that returns one number is needed; got {type(value).__name__}; return a scalar"
        ) from error


def _like(value: Tensor, box: Box) -> Any:
    return value.cpu().numpy() if box.is_numpy else value
