"""`bilevel`: two levels, a method and limits in, a frozen result out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Callback, Ended, Limits, Measured, drive
from ..methods import need_method
from ..outcome import Result, Status
from ..seeds import as_generator
from ..values import Packing
from .bsvrb import no_batch
from .problem import Blocks, Level, Method, Sample

FAR = 1e12
"""An iterate this many times larger than the start (or than one) has diverged."""


@dataclass(frozen=True)
class BilevelResult(Result):
    """A `Result` with the lower solutions `y` [m, d] and the gradients and second-order products taken, block by block."""

    y: Tensor
    nsfo: int
    nhvp: int


def bilevel(
    upper: Level,
    lower: Level,
    x0: Any,
    y0: Tensor,
    *,
    method: Method,
    sample: Sample | None = None,
    max_iterations: int,
    rtol: float = 0.0,
    atol: float = 0.0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    check_every: int = 1,
    grad_norm: Callable[[Any], float] | None = None,
    seed: int | torch.Generator = 0,
    callback: Callback | None = None,
    keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> BilevelResult:
    """Find min over x of (1/m) Σᵢ fᵢ(x, yᵢ(x)) with yᵢ(x) = argmin over y of gᵢ(x, y), gᵢ strongly convex in y.

    `upper`, `lower`: (x, y [I, d], blocks [I], batch) → fᵢ and gᵢ of the chosen blocks, shape [I], differentiable twice.
    `x0`: a tensor, an array or a mapping of them (the levels always see tensors); `y0` [m, d]: a row a block (m = 1 for one
    problem). `sample(blocks, generator)`: draws the batch of a step, handed to both levels; both iterates of a step see the
    same one. Default: `None`, no noise.

    The residual is `grad_norm(x)` where given (the norm of the true hypergradient), else the norm of the method's own
    direction, an estimate; it is compared with `atol` and, with `grad_norm` only, with `rtol` times its size at the
    start. `max_evaluations` limits gradients and second-order products together. Returns the last iterate; with `grad_norm`,
    where a tolerance was not met, the callback ended the run or it failed, the best measured. Raises `UserError` where an
    oracle's shape or an option is wrong; NaN and
    divergence (also of y, as where a lower problem is not convex) end the run with a status.
    Not for lower problems without strong convexity: yᵢ(x) is then no function.

    >>> a = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    >>> lower = lambda x, y, blocks, batch: ((y - x) ** 2).sum(1) / 2
    >>> upper = lambda x, y, blocks, batch: ((y - a[blocks]) ** 2).sum(1) / 2
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> from trainwright.solvers.bilevel import BSVRB
    >>> method = BSVRB(step_x=0.1, step_y=0.5, num_sampled=2)
    >>> result = bilevel(upper, lower, zero, torch.zeros(2, 1, dtype=torch.float64), method=method, max_iterations=400)
    >>> result.success, round(float(result.x), 6)
    (True, 2.0)
    """
    given, x = Packing.of(x0, "x0")
    packing = replace(given, is_numpy=False)  # both levels are functions of tensors
    y = _lower_start(y0, x)
    problem = Blocks(upper, lower, packing, len(y))
    need_method(method, Method, "such as BSVRB(…)", "see trainwright.solvers.bilevel")
    if rtol > 0 and grad_norm is None:
        raise UserError(
            f"grad_norm is needed for rtol; got rtol={rtol} alone; the method's own direction is an estimate whose first size "
            "says little: give grad_norm(x), or an atol, or neither"
        )
    generator, draw = as_generator(seed, x.device), sample or no_batch

    measure = _Directions() if grad_norm is None else lambda state: Measured(float(grad_norm(packing.unpack(state.x))))
    start = method.start(problem, x, y)
    far = FAR * max(1.0, float(x.abs().max()), float(y.abs().max()) if y.numel() else 0.0)

    def step(state: Any) -> Any:
        found = method.step(problem, state, draw, generator)
        if max(float(found.x.abs().max()), float(found.y.abs().max())) > far:
            raise Ended(Status.DIVERGED)
        return found

    run = drive(
        start,
        step,
        measure,
        # A method's first directions may be small where the gradient is not: no size to hold a later one against.
        Limits(max_iterations, rtol, atol, max_evaluations, max_seconds, 1e12 if grad_norm else math.inf, check_every),
        counts=problem.counts,
        callback=callback,
        keep_history=keep_history,
        progress=progress,
    )
    # The smallest of many estimates is the luckiest, not the best: without grad_norm the last one stands.
    is_last = run.status.success or (grad_norm is None and run.status not in (Status.NOT_FINITE, Status.DIVERGED))
    point = run.last if is_last else run.best
    if not bool(point.x.isfinite().all() and point.y.isfinite().all()):
        point = start
    return BilevelResult(
        x=given.unpack(point.x),
        y=point.y if isinstance(y0, Tensor) else point.y.cpu().numpy(),
        fun=_upper_value(problem, point, draw, generator),
        success=run.status.success,
        status=run.status,
        message=run.message,
        nit=run.nit,
        nfev=run.counts["nfev"],
        nsfo=run.counts["nsfo"],
        nhvp=run.counts["nhvp"],
        history=run.history,
    )


class _Directions:
    """Measures a state by its direction: unknown before the first step, and as long as it is exactly zero.

    Version 2 of `BSVRB` starts with v = 0, so that its first direction may vanish anywhere; it is no sign of convergence.
    """

    def __init__(self) -> None:
        self.known = False

    def __call__(self, state: Any) -> Measured:
        size = float(state.direction.norm())
        self.known = self.known or size > 0
        # There is no objective to look at: 0 says that all is well, NaN that it is not.
        all_is_well = state.nit == 0 or math.isfinite(size)
        return Measured(size if self.known else math.nan, fun=0.0 if all_is_well else math.nan)


def _lower_start(y0: Any, like: Tensor) -> Tensor:
    rows = y0.detach() if isinstance(y0, Tensor) else torch.as_tensor(np.asarray(y0))
    if rows.dim() != 2 or len(rows) == 0 or not bool(torch.isfinite(rows).all()):
        found = list(rows.shape) if bool(torch.isfinite(rows).all()) else "NaN or infinity in it"
        raise UserError(
            f"a finite y0 of shape [blocks, variables of a block] is needed; got {found}; give a row a block"
        )
    return rows.to(like)


def _upper_value(problem: Blocks, point: Any, draw: Sample, generator: torch.Generator) -> float:
    """The mean of the upper level over all blocks at the y in hand, on one more batch."""
    blocks = torch.arange(problem.num_blocks, device=point.y.device)
    x, y = point.x.detach().requires_grad_(), point.y.detach().requires_grad_()
    return float(problem.values(problem.upper, "upper", x, y, blocks, draw(blocks, generator)).mean().detach())
