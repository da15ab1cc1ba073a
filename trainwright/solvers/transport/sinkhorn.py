"""Sinkhorn's iterations in the log domain: the baseline, and the first stage of the Newton method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..driver import Callback, Counts, Limits, drive
from .problem import Problem, make_problem
from .result import Potentials, TransportResult, as_result, measure


def solve_sinkhorn(
    a: Any, b: Any, cost: Any, reg: float, *, rtol: float = 0.0, atol: float = 1e-9, max_iterations: int = 1000,
    max_evaluations: int | None = None, max_seconds: float | None = None, check_every: int = 1,
    callback: Callback | None = None, keep_history: bool = False, progress: Callable[[str], None] | None = None,
) -> TransportResult:  # fmt: skip
    """Solve entropic transport, min ⟨P, C⟩ + reg Σ P (log P − 1) with marginals a (n,) and b (m,), by Sinkhorn steps.

    Each iteration sets f_i = reg (log a_i − log Σ_j exp((g_j − C_ij)/reg)), then g likewise: two passes over the cost.
    Nothing underflows, however small `reg` (in the cost's units) is. It stops when the L1 error of both marginals is at
    most `atol`, or `rtol` times that at the start. The rate is linear and tends to one as reg → 0: prefer `solve_sns` for
    small reg or tight tolerances, and a kernel matrix (POT's `sinkhorn`) for large reg, where exp(−C/reg) does not underflow
    and a step is one product.

    Weights may be zero: such points get potentials of −∞ and a plan of zero. Marginals must sum to one within 1e-6 and are
    divided by their sums; that is all that is normalised: the cost is taken as it is.

    Errors: `UserError` for a cost that is negative or not finite, negative weights, marginals that do not sum to one, reg ≤ 0.

    >>> result = solve_sinkhorn([0.5, 0.5], [0.3, 0.7], [[0.0, 1.0], [1.0, 0.0]], reg=0.1)
    >>> result.success, round(result.cost, 3)
    (True, 0.2)

    Source: Cuturi, *Sinkhorn Distances*, NeurIPS 2013; log domain after Schmitzer, SIAM J. Sci. Comput. 2019.
    """
    problem = make_problem(a, b, cost, reg)
    counts = Counts()
    run = drive(
        start(problem, counts), lambda state: sinkhorn_step(problem, state, counts),
        lambda state: measure(problem, state),
        Limits(max_iterations, rtol, atol, max_evaluations, max_seconds, float("inf"), check_every),
        counts=counts, callback=callback, keep_history=keep_history, progress=progress,
    )  # fmt: skip
    return as_result(problem, run)


def start(problem: Problem, counts: Counts) -> Potentials:
    """Return f = 0 and the g that meets the second marginal: a state whose columns are exact."""
    return _with_columns(problem, torch.zeros_like(problem.a), counts)


def sinkhorn_step(problem: Problem, state: Potentials, counts: Counts) -> Potentials:
    """Meet the first marginal, then the second; the error left stands in the rows."""
    counts.add(sinkhorn=1)
    return _with_columns(problem, state.f + problem.reg * (problem.a.log() - state.log_rows), counts)


def _with_columns(problem: Problem, f: torch.Tensor, counts: Counts) -> Potentials:
    counts.add(nfev=2)
    g = problem.reg * (problem.b.log() - problem.col_lse(f))
    return Potentials(f, g, log_rows=f / problem.reg + problem.row_lse(g), cols=problem.b)
