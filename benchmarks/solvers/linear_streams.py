"""Streams of diffusion systems on which ω is learned, against fixed ω, Young's formula and the best ω of each system.

python -m benchmarks.solvers.linear streams [--quick]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from statistics import mean, median
from typing import Any

import numpy as np
from scipy import sparse

from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.linear import (
    OMEGAS,
    ChebCB,
    LinearResult,
    PoissonGrid,
    TsallisINF,
    TsallisINFCB,
    Tuner,
    optimal_omega,
    solve_sor,
    solve_ssor_pcg,
    solve_stream,
)

SIDE, LAST = 10, 300
System = tuple[sparse.csr_array, np.ndarray, float]
Solver = Callable[..., LinearResult]
FIXED = (0, 8, 12, 16)
"""Places in `OMEGAS` that have a row of their own: 1, 1.4, 1.6 and 1.8."""


def diffusion(num: int, seed: int, spread: tuple[float, float]) -> Iterator[System]:
    """The 5-point Laplacian on 10 × 10 points plus c I, c = −0.15 + 0.6 Beta(spread)."""
    random, laplace = np.random.default_rng(seed), PoissonGrid((SIDE, SIDE)).matrix()
    for _ in range(num):
        context = -0.15 + 0.6 * random.beta(*spread)
        right = random.normal(size=SIDE * SIDE)
        yield sparse.csr_array(laplace + context * sparse.eye_array(SIDE * SIDE)), right, context


def young(context: float) -> float:
    """Return the optimal ω of SOR for the system with this shift: what one knows who knows the spectrum."""
    return optimal_omega(4 * math.cos(math.pi / (SIDE + 1)) / (4 + context))


def one_seed(systems: list[System], seed: int, solve: Solver) -> dict[str, tuple[float, float, float]]:
    """Return, for each choice of ω, mean iterations in the first and last rounds, and milliseconds a round."""
    tail = systems[-LAST:]
    counts = np.array([[solve(A, b, omega).nit for omega in OMEGAS] for A, b, _ in tail[::3]])
    found = {f"fixed ω = {OMEGAS[place]:.1f}": (math.nan, float(counts[:, place].mean()), math.nan) for place in FIXED}
    found["best fixed ω, in hindsight"] = (math.nan, float(counts.mean(0).min()), math.nan)
    found["Young's ω for each system"] = (math.nan, mean(solve(A, b, young(c)).nit for A, b, c in tail), math.nan)
    found["best ω for each system, in hindsight"] = (math.nan, float(counts.min(1).mean()), math.nan)
    tuners: dict[str, Tuner] = {
        "Tsallis-INF": TsallisINF(seed=seed),
        "Tsallis-INF-CB, 5 bins": TsallisINFCB(-0.15, 0.45, seed=seed),
        "ChebCB, 6 features": ChebCB(-0.15, 0.65, seed=seed),
    }
    for name, tuner in tuners.items():
        began = time.process_time()
        run = solve_stream(systems, tuner, solve=solve)
        milliseconds = 1e3 * (time.process_time() - began) / len(systems)
        found[name] = (mean(run.costs[:LAST]), run.mean_cost(LAST), milliseconds)
    return found


def compare(spread: tuple[float, float], num: int, seeds: range, solve: Solver) -> list[dict[str, Any]]:
    runs: dict[str, list[tuple[float, float, float]]] = {}
    for seed in seeds:
        for name, values in one_seed(list(diffusion(num, seed, spread)), seed, solve).items():
            runs.setdefault(name, []).append(values)
        print(seed, {name: values[-1] for name, values in runs.items()}, flush=True)
    best = median(last for _, last, _ in runs["best fixed ω, in hindsight"])
    return [
        {
            "choice of ω": name,
            f"mean iterations, first {LAST}": median(first for first, _, _ in values),
            f"last {LAST}": median(last for _, last, _ in values),
            "last / best fixed": median(last for _, last, _ in values) / best,
            "ms a round": median(ms for _, _, ms in values),
        }
        for name, values in runs.items()
    ]


def tables(quick: bool) -> None:
    sections: dict[str, Any] = {}
    num, seeds = (300, range(1)) if quick else (1500, range(2))
    high, low = ("high variance (Beta(0.5, 1.5))", (0.5, 1.5)), ("low variance (Beta(2, 6))", (2.0, 6.0))
    for solver, solve, (name, spread) in (
        ("SOR", solve_sor, high), ("SOR", solve_sor, low), ("SSOR-PCG", solve_ssor_pcg, high),
    ):  # fmt: skip
        heading = f"{solver}: {num} systems of {SIDE**2} unknowns, shifts of {name}, {len(seeds)} seeds"
        sections[heading] = compare(spread, num, seeds, solve)
    write(
        "solvers-linear-streams",
        sections,
        [
            CPU_SECONDS,
            "Medians over seeds of means over rounds; the rows without a first number are of the last rounds alone "
            "(fixed ω and hindsight: every third of them, the tuners' grid).",
            "Milliseconds a round hold the solution and the tuner. Young's formula is for SOR.",
        ],
        keep=not quick,
    )
