"""Poisson problems up to a million unknowns, and streams of diffusion systems on which ω is learned.

    python -m benchmarks.solvers.linear poisson|streams [--quick]

Poisson: residual below 1e-6 of the start's, zero start, DCDM at most 300 iterations (40 in three dimensions). Peers that are
not installed are left out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import linalg as sparse_linalg

from benchmarks.solvers.record import write
from trainwright.solvers.linear import (
    OMEGAS,
    ChebCB,
    DirectionNet,
    PoissonGrid,
    TsallisINF,
    TsallisINFCB,
    optimal_omega,
    solve_dcdm,
    solve_sor,
    solve_ssor_pcg,
    solve_stream,
    train_direction_net,
)

RTOL = 1e-6
Array = np.ndarray
Found = tuple[Array, int, float]
"""Solution, iterations, seconds of preparation."""


def right_side(shape: tuple[int, ...]) -> Array:
    """Noise on top of blocks and a smooth part: every part of the spectrum."""
    random = np.random.default_rng(0)
    axes = np.meshgrid(*[np.linspace(0, 1, size) for size in shape], indexing="ij")
    smooth = np.prod([np.cos(3 * axis) + axis**2 for axis in axes], axis=0)
    blocks = np.prod([(axis > 0.2) & (axis < 0.5) for axis in axes], axis=0)
    return np.asarray(smooth + 2 * blocks + random.normal(size=shape))


def best_omega(shape: tuple[int, ...]) -> float:
    return optimal_omega(float(np.mean([math.cos(math.pi / (size + 1)) for size in shape])))


def sor(grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet) -> Found:
    result = solve_sor(matrix, right.ravel(), best_omega(grid.shape), rtol=RTOL)
    return result.x, result.nit, 0.0


def ssor_pcg(grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet) -> Found:
    result = solve_ssor_pcg(matrix, right.ravel(), best_omega(grid.shape), rtol=RTOL)
    return result.x, result.nit, 0.0


def dcdm(grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet) -> Found:
    result = solve_dcdm(
        grid.apply, torch.from_numpy(right), net.direction, rtol=RTOL, maxiter=300 if right.ndim < 3 else 40
    )
    return result.x.numpy().ravel(), result.nit, 0.0


def counted_cg(matrix: sparse.csr_array, right: Array, preconditioner: Any = None) -> tuple[Array, int]:
    count = [0]

    def tell(_: Array) -> None:
        count[0] += 1

    x, _ = sparse_linalg.cg(matrix, right.ravel(), rtol=RTOL, M=preconditioner, callback=tell)
    return x, count[0]


def scipy_cg(grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet) -> Found:
    return *counted_cg(matrix, right), 0.0


def scipy_ilu(grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet) -> Found:
    begin = time.perf_counter()
    # Without pivoting and with a symmetric order the factors of a symmetric matrix stay nearly symmetric, as CG needs.
    factor = sparse_linalg.spilu(
        sparse.csc_array(matrix), drop_tol=1e-3, fill_factor=8, diag_pivot_thresh=0.0,
        options={"SymmetricMode": True}, permc_spec="MMD_AT_PLUS_A",
    )  # fmt: skip
    took = time.perf_counter() - begin
    return *counted_cg(matrix, right, sparse_linalg.LinearOperator(matrix.shape, factor.solve)), took


def pyamg_solver(grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet) -> Found:
    import pyamg

    begin = time.perf_counter()
    hierarchy = pyamg.ruge_stuben_solver(sparse.csr_matrix(matrix))
    took = time.perf_counter() - begin
    residuals: list[float] = []
    x = hierarchy.solve(right.ravel(), tol=RTOL, accel="cg", residuals=residuals)
    return x, len(residuals) - 1, took


METHODS: dict[str, Callable[[PoissonGrid, sparse.csr_array, Array, DirectionNet], Found]] = {
    "SOR, optimal ω": sor,
    "SSOR-PCG, optimal ω": ssor_pcg,
    "DCDM": dcdm,
    "SciPy cg": scipy_cg,
    "SciPy cg + spilu": scipy_ilu,
    "PyAMG Ruge-Stüben + cg": pyamg_solver,
}
SLOW_ABOVE = {"SOR, optimal ω": 300_000, "SciPy cg + spilu": 300_000}
"""Unknowns above which a method is left out: it would take the most of the run."""


def poisson(shape: tuple[int, ...], net: DirectionNet) -> list[dict[str, Any]]:
    grid, right = PoissonGrid(shape), right_side(shape)
    matrix, rows = grid.matrix(), []
    for name, method in METHODS.items():
        if right.size > SLOW_ABOVE.get(name, right.size):
            continue
        begin = time.perf_counter()
        try:
            x, iterations, prepared = method(grid, matrix, right, net)
        except ImportError:
            continue
        seconds = time.perf_counter() - begin
        residual = float(np.linalg.norm(matrix @ x - right.ravel()) / np.linalg.norm(right))
        rows.append({"method": name, "iterations": iterations, "seconds": seconds, "of these to prepare": prepared})
        rows[-1]["residual"] = residual
        print(shape, rows[-1], flush=True)
    return rows


def trained(num_dims: int, quick: bool) -> tuple[DirectionNet, str]:
    random = torch.Generator().manual_seed(0)
    sizes, channels, num_steps, batch = ((32, 64), 16, 600, 10) if num_dims == 2 else ((12, 16, 24), 16, 240, 4)
    net = DirectionNet(num_dims, channels=channels, generator=random)
    begin = time.perf_counter()
    result = train_direction_net(
        net, [PoissonGrid((size,) * num_dims) for size in sizes], num_steps=60 if quick else num_steps, batch_size=batch,
        generator=random,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    text = (
        f"DCDM in {num_dims} dimensions: {channels} channels, all levels share their weights, trained on grids of side {sizes} "
        f"for {result.nit} steps of {batch} in {seconds:.0f} s (not in the table); last loss {result.fun:.4f}."
    )
    print(text, flush=True)
    return net, text


def diffusion(num: int, seed: int, spread: tuple[float, float]) -> Iterator[tuple[sparse.csr_array, Array, float]]:
    """The 5-point Laplacian on 10 × 10 points plus c I, c = −0.15 + 0.6 Beta(spread)."""
    random, laplace = np.random.default_rng(seed), PoissonGrid((10, 10)).matrix()
    for _ in range(num):
        context = -0.15 + 0.6 * random.beta(*spread)
        right = random.normal(size=100)
        yield sparse.csr_array(laplace + context * sparse.eye_array(100)), right, context


def stream(spread: tuple[float, float], num: int, seeds: range) -> list[dict[str, Any]]:
    runs: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        systems = list(diffusion(num, seed, spread))
        tail = systems[-300:]
        counts = np.array([[solve_sor(A, b, omega).nit for omega in OMEGAS[::2]] for A, b, _ in tail[::3]])
        for place, omega in enumerate(OMEGAS[::2]):
            if omega in (OMEGAS[0], OMEGAS[8], OMEGAS[12], OMEGAS[16]):
                runs.setdefault(f"fixed ω = {omega:.2f}", []).append((math.nan, counts[:, place].mean()))
        runs.setdefault("best fixed ω", []).append((math.nan, counts.mean(0).min()))
        runs.setdefault("best ω for each system", []).append((math.nan, counts.min(1).mean()))
        tuners = {
            "Tsallis-INF": TsallisINF(random=seed),
            "Tsallis-INF-CB, 5 bins": TsallisINFCB(-0.15, 0.45, random=seed),
            "ChebCB, 6 features": ChebCB(-0.15, 0.65, random=seed),
        }
        for name, tuner in tuners.items():
            found = solve_stream(systems, tuner)
            runs.setdefault(name, []).append((mean(found.costs[:300]), found.mean_cost(300)))
        print(seed, {name: values[-1] for name, values in runs.items()}, flush=True)
    best = median(last for _, last in runs["best fixed ω"])
    return [
        {
            "choice of ω": name,
            "mean iterations, first 300": median(first for first, _ in values),
            "last 300": median(last for _, last in values),
            "last / best fixed": median(last for _, last in values) / best,
        }
        for name, values in runs.items()
    ]


def poisson_tables(quick: bool) -> None:
    sections: dict[str, Any] = {}
    remarks = [f"Left out above {SLOW_ABOVE} unknowns: they would take the most of the run."]
    nets: dict[int, DirectionNet] = {}
    for shape in [(64, 64)] if quick else [(128, 128), (512, 512), (1024, 1024), (101, 101, 101)]:
        if len(shape) not in nets:
            nets[len(shape)], text = trained(len(shape), quick)
            remarks.append(text)
        sections[f"Poisson, {' × '.join(map(str, shape))}"] = poisson(shape, nets[len(shape)])
        write("solvers-linear-poisson", sections, remarks, packages=("pyamg",))


def stream_tables(quick: bool) -> None:
    sections: dict[str, Any] = {}
    num, seeds = (300, range(1)) if quick else (1500, range(2))
    spreads = {"high variance (Beta(0.5, 1.5))": (0.5, 1.5), "low variance (Beta(2, 6))": (2.0, 6.0)}
    for name, spread in spreads.items():
        sections[f"{num} systems of 100 unknowns, shifts of {name}"] = stream(spread, num, seeds)
        write(
            "solvers-linear-streams",
            sections,
            [
                "Medians over seeds of means over rounds; the rows of fixed ω are from every third of the last 300 systems."
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("poisson", "streams"))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    (poisson_tables if arguments.what == "poisson" else stream_tables)(arguments.quick)


if __name__ == "__main__":
    main()
