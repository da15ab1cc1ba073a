"""How a run of a solver ends: `Status`, whose text is the remedy, and `Result`, what every solver returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    """Why the run ended; the value says what to do about it."""

    CONVERGED = "converged: the residual met the tolerance"
    MAX_ITERATIONS = "the iteration limit was reached; raise max_iterations or loosen the tolerance"
    MAX_EVALUATIONS = "the evaluation limit was reached; raise max_evaluations or loosen the tolerance"
    MAX_SECONDS = "the time limit was reached; raise max_seconds or loosen the tolerance"
    STOPPED = (
        "stopped by the callback or by Ctrl-C; the best iterate so far is returned; go on from there, or run it again"
    )
    NOT_FINITE = "a value or gradient was not finite; the best iterate so far is returned; check the oracle, or take smaller steps"
    DIVERGED = (
        "residual or iterates grew beyond the divergence limit; the best iterate so far is returned; take smaller steps"
    )
    STALLED = (
        "no step makes progress any more at this precision; loosen the tolerance, rescale the problem, or use float64"
    )
    BREAKDOWN = "a linear system or direction broke down; the matrix may be singular or not symmetric positive definite: check it"
    INFEASIBLE = "the constraints cannot be met near the iterates; check them, or start nearer to a feasible point"
    COMPLETED = "the budget that was asked for is spent (no tolerance was asked for)"

    @property
    def success(self) -> bool:
        return self in (Status.CONVERGED, Status.COMPLETED)


@dataclass(frozen=True)
class Result:
    """What a solver returns, in scipy's names; a family adds its own fields and counts by subclassing.

    `x` is the best iterate (or what the method defines as its output), `fun` the objective there, `nit` steps taken,
    `nfev` evaluations of the oracle as the theory counts them, `history` lists by name (empty unless asked for).
    """

    x: Any
    fun: float
    success: bool
    status: Status
    message: str
    nit: int
    nfev: int
    history: Mapping[str, list[float]] = field(default_factory=dict, kw_only=True)
