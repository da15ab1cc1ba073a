"""The heat equation's steps, a system each, ω learned on the way: against fixed ω and plain CG, over the last period.

python -m benchmarks.solvers.linear heat [--quick]
"""

from __future__ import annotations

import time
from typing import Any

from scipy.sparse import linalg as sparse_linalg

from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.linear import (
    OMEGAS,
    ChebCB,
    HeatStream,
    TsallisINF,
    TsallisINFCB,
    Tuner,
    solve_sor,
    solve_ssor_pcg,
    solve_stream,
)

PERIODS = 3


def iterations_of_cg(side: int, num_steps: int) -> list[int]:
    """SciPy's conjugate gradients, unpreconditioned, to the same tolerance from zero."""
    heat, found = HeatStream(side, num_steps, float(PERIODS)), []
    for matrix, right, _ in heat:
        seen: list[Any] = []
        heat.u, _ = sparse_linalg.cg(matrix, right, rtol=1e-8, maxiter=10_000, callback=seen.append)
        found.append(len(seen))
    return found


def row(name: str, tuner: Tuner, side: int, num_steps: int, solve: Any) -> dict[str, Any]:
    heat, began = HeatStream(side, num_steps, float(PERIODS)), time.process_time()
    run = solve_stream(heat, tuner, solve=solve, on_result=heat.take)
    milliseconds = 1e3 * (time.process_time() - began) / num_steps
    return {
        "choice of ω": name,
        "iterations, last period": run.mean_cost(num_steps // PERIODS),
        "ms a step": milliseconds,
    }


def rows(side: int, num_steps: int, solve: Any) -> list[dict[str, Any]]:
    high = HeatStream(side, num_steps, float(PERIODS)).highest_context
    fixed = [row(f"fixed ω = {omega:.2f}", TsallisINF([omega]), side, num_steps, solve) for omega in OMEGAS[::2]]
    best = min(fixed, key=lambda each: float(each["iterations, last period"]))
    learned = [
        row("Tsallis-INF", TsallisINF(), side, num_steps, solve),
        row("Tsallis-INF-CB, 6 bins", TsallisINFCB(0.0, high, num_bins=6), side, num_steps, solve),
        row("ChebCB, 6 features", ChebCB(0.0, high), side, num_steps, solve),
    ]
    cg = iterations_of_cg(side, num_steps)[-num_steps // PERIODS :]
    plain = {"choice of ω": "plain CG (SciPy)", "iterations, last period": sum(cg) / len(cg), "ms a step": ""}
    found = [{**best, "choice of ω": f"best of ten fixed, {best['choice of ω'][6:]}"}, fixed[0], *learned, plain]
    of = float(best["iterations, last period"])
    return [{**each, "against the best fixed": float(each["iterations, last period"]) / of} for each in found]


def tables(quick: bool) -> None:
    sizes = [(10, 150)] if quick else [(10, 450), (25, 300)]
    write(
        "solvers-linear-heat",
        {
            f"{name}, {side} × {side} points, {num_steps} steps in {PERIODS} periods": rows(side, num_steps, solve)
            for side, num_steps in sizes
            for name, solve in (("SOR", solve_sor), ("SSOR-PCG", solve_ssor_pcg))
        },
        [
            CPU_SECONDS,
            "Crank and Nicolson's steps, κ = max(0.1 sin 2πt, −10 sin 2πt); the first periods are for learning.",
        ],
        keep=not quick,
    )
