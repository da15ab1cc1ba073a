"""`minimax`: the problem, the method and the limits in, a frozen result out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...artifacts import UserError
from ..driver import Callback, Limits, Measured, drive
from ..methods import need_method
from ..outcome import Result, Status
from ..seeds import as_generator
from ..values import Packing
from .problem import Fun, Jac, Method, Oracle


@dataclass(frozen=True)
class MinimaxResult(Result):
    """A `Result` with the other player's `y`, the norm of both gradients at (x, y), and the component gradients taken."""

    y: Any
    grad_norm: float
    nsfo: int


def minimax(
    fun: Fun | None,
    x0: Any,
    y0: Any,
    num_components: int,
    *,
    method: Method,
    jac: Jac | None = None,
    max_iterations: int,
    rtol: float = 0.0,
    atol: float = 0.0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    check_every: int | None = None,
    max_batch: int | None = None,
    seed: int | torch.Generator = 0,
    callback: Callback | None = None,
    keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> MinimaxResult:
    """Find a saddle, min over x, max over y, of f(x, y) = (1/n) Σᵢ fᵢ(x, y), from gradients of single components.

    `fun(x, y, indices)`: the mean of the components `indices` (int64, repetitions possible), a differentiable scalar. `jac(x, y,
    indices)`: the two mean gradients instead of autograd (then `fun` may be `None`). `x0`, `y0`: tensors, NumPy arrays
    (`jac` is needed then) or mappings of them; the oracle sees, and the result has, the kind given. `num_components`: n.

    `max_iterations`: steps of the method (of the inner one, for `AccSpiderGDA`). The residual is the norm of the full gradient;
    the run ends where it is at most `atol`, or `rtol` times its size at the start. It is measured every `check_every`
    steps (default: where the method computes it anyway), at the end, and at the point returned. A measurement counts as n
    component gradients, unless the method needs the same gradient: `nsfo` is all that the oracle was asked for.
    `max_evaluations`: limit of component gradients; the measurements of the end come on top. `max_batch`: components a
    call, for full gradients that do not fit in memory.

    Returns the method's own output (its `output_rule`) wherever the run ends; only where it ended as NOT_FINITE or DIVERGED,
    the best point measured.
    Raises `UserError` where the oracle or an option is not as described; NaN and divergence end the run with a status.
    Not for constraints on x or y, nor for a bilinear game without curvature: gradient descent ascent circles there.

    >>> import torch
    >>> from trainwright.solvers.minimax import SpiderGDA
    >>> a = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    >>> def fun(x, y, indices):
    ...     return (a[indices] * (x - 1) ** 2 + x * y - a[indices] * y**2).mean() / 2
    >>> zero = torch.zeros((), dtype=torch.float64)
    >>> result = minimax(fun, zero, zero, 3, method=SpiderGDA(0.1, 0.1), max_iterations=3000, rtol=1e-8)
    >>> result.success, round(float(result.x), 4), round(float(result.y), 4)
    (True, 0.9412, 0.2353)
    """
    (packing_x, x), (packing_y, y) = Packing.of(x0, "x0"), Packing.of(y0, "y0")
    if (x.dtype, x.device) != (y.dtype, y.device):
        raise UserError(
            f"x0 and y0 of one dtype on one device are needed; got {x.dtype} on {x.device} and {y.dtype} on {y.device}"
        )
    need_method(method, Method, "such as SpiderGDA(…) or GDA(…)", "make one with its steps")
    oracle = Oracle(fun, jac, num_components, (packing_x, packing_y), max_batch=max_batch, device=x.device)
    generator = as_generator(seed, x.device)

    def measure(state: Any) -> Measured:
        value, grad_x, grad_y = oracle.look(state.x, state.y)
        return Measured(residual=float(torch.hypot(grad_x.norm(), grad_y.norm())), fun=value)

    limits = Limits(
        max_iterations=max_iterations,
        rtol=rtol,
        atol=atol,
        max_evaluations=max_evaluations,
        max_seconds=max_seconds,
        check_every=check_every or method.check_every(num_components),
    )
    run = drive(
        method.start(oracle, x, y, generator),
        lambda state: method.step(oracle, state, generator),
        measure,
        limits,
        counts=oracle.counts,
        callback=callback,
        keep_history=keep_history,
        progress=progress,
    )
    has_failed = run.status in (Status.NOT_FINITE, Status.DIVERGED)
    point = run.best if has_failed else method.output(run.last)
    found = measure(point)
    return MinimaxResult(
        x=packing_x.unpack(point.x),
        y=packing_y.unpack(point.y),
        fun=found.fun,
        grad_norm=found.residual,
        success=run.status.success,
        status=run.status,
        message=run.message,
        nit=run.nit,
        nfev=run.counts["nfev"],
        nsfo=run.counts["nsfo"],
        history=run.history,
    )
