"""What a method of entropic transport returns: potentials, and the plan only when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..driver import LoopResult, Measured
from ..outcome import Result, Status
from .problem import Kept, Problem


@dataclass(frozen=True)
class Potentials:
    """A dual point: f (n,), g (m,), log of the plan's row sums and its column sums; `kept` where a Newton step left it."""

    f: Tensor
    g: Tensor
    log_rows: Tensor
    cols: Tensor
    kept: Kept | None = None
    dual: float = float("nan")
    stage: str = "sinkhorn"


@dataclass(frozen=True)
class TransportResult(Result):
    """`x` is the pair of potentials (f, g), each of the cost's unit (−∞ at points without weight).

    `fun` is ⟨P, C⟩ + reg · Σ P log P.

    `nfev` counts passes over the cost (n · m exponentials each), `ncg` sparse products of the Newton systems.
    """

    cost: float
    """⟨P, C⟩ of the plan."""
    marginal_error: float
    """‖P 1 − a‖₁ + ‖Pᵀ 1 − b‖₁."""
    num_sinkhorn: int
    num_newton: int
    ncg: int
    problem: Problem = field(repr=False)

    def plan(self) -> Tensor:
        """Return the plan (n, m) in float64; it is computed at the call, and as large as the cost."""
        return self.problem.whole_plan(*self.x)


def as_result(problem: Problem, run: LoopResult[Potentials]) -> TransportResult:
    best, measured = run.best, run.best_measured
    transport, entropy = problem.objective(best.f, best.g)
    counts = run.counts
    potentials = (best.f, best.g) if problem.support is None else problem.support.spread(best.f, best.g)
    return TransportResult(
        x=potentials, fun=transport + problem.reg * entropy, success=run.status.success, status=run.status,
        message=message(run.status), nit=run.nit, nfev=counts["nfev"], history=run.history, cost=transport,
        marginal_error=measured.residual, num_sinkhorn=counts["sinkhorn"], num_newton=counts["newton"],
        ncg=counts["ncg"], problem=problem,
    )  # fmt: skip


def message(status: Status) -> str:
    if status is Status.MAX_ITERATIONS:
        return f"{status.value}; more Sinkhorn steps first (num_sinkhorn), more kept entries (density) or a larger reg help"
    return status.value


def measure(problem: Problem, state: Potentials) -> Measured:
    """The L1 error of both marginals, and the dual value where it is known."""
    error = (state.log_rows.exp() - problem.a).abs().sum() + (state.cols - problem.b).abs().sum()
    return Measured(residual=float(error), fun=state.dual, extra={"newton": float(state.stage == "newton")})
