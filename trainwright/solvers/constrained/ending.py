"""What a constrained run returns, and how its end is named: infeasible, dependent, stalled while violated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..outcome import Result, Status
from .problem import Values

VIOLATED, STATIONARY = 1e-6, 1e-2
"""From where on constraints count as violated; and the slope of ‖c‖²/2, over ‖c‖ ‖G‖, that counts as zero."""


@dataclass(frozen=True)
class ConstrainedResult(Result):
    """`x` (n,) as x0 was; `multipliers` (m,) of L = f + λᵀc; `kkt_residual` is ‖(∇ₓL, c)‖₂.

    `nfev`, `njev`, `nhev` count values, gradients with Jacobians, and Hessians; `num_sketches` the row actions of all
    Newton systems together; `num_capped` the systems that met `max_sketches` before their tolerance.
    """

    multipliers: Any
    jac: Any
    kkt_residual: float
    constr_violation: float
    njev: int
    nhev: int
    num_sketches: int
    num_capped: int


def why_dependent(values: Values) -> Status:
    """Return INFEASIBLE where no step x + d meets c + G d = 0, else BREAKDOWN: some constraints only say the same twice."""
    constraints, jacobian = values.constraints, values.jacobian
    nearest = np.linalg.lstsq(jacobian, -constraints, rcond=None)[0]
    left = float(np.linalg.norm(constraints + jacobian @ nearest))
    return Status.INFEASIBLE if left > 1e-6 * max(float(np.linalg.norm(constraints)), 1e-6) else Status.BREAKDOWN


def only_violation_is_left(values: Values) -> bool:
    """Whether c is not met and ‖c‖² is nearly stationary: no step near here brings the constraints nearer to zero."""
    size = float(np.linalg.norm(values.constraints))
    slope = float(np.linalg.norm(values.jacobian.T @ values.constraints))
    return size > VIOLATED and slope <= STATIONARY * size * max(float(np.linalg.norm(values.jacobian)), 1.0)


def message(status: Status, num_capped: int, values: Values) -> str:
    """Return the remedy in this family's terms."""
    if status is Status.BREAKDOWN:
        return "the constraints' gradients are linearly dependent; leave out redundant constraints, or start elsewhere"
    violation = float(np.abs(values.constraints).max(initial=0.0))
    if status is Status.STALLED and violation > VIOLATED:
        return f"{status.value}; the constraints are violated by {violation:.3g}: check that they can be met together"
    if num_capped and not status.success:
        return f"{status.value}; {num_capped} Newton systems met max_sketches: raise it, or use sketch='exact'"
    return status.value
