"""Poisson problems up to a million unknowns, and streams of diffusion systems on which ω is learned.

    python -m benchmarks.solvers.linear poisson-2d|poisson-3d|streams [--quick]

Poisson: residual below 1e-6 of the start's, zero start, DCDM at most 100 iterations. Medians over three right-hand sides
where there are fewer than 200,000 unknowns, one above. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import linalg as sparse_linalg

from benchmarks.solvers import linear_heat, linear_streams
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.linear import (
    DirectionNet,
    PoissonGrid,
    optimal_omega,
    solve_dcdm,
    solve_sor,
    solve_ssor_pcg,
    train_direction_net,
)

RTOL = 1e-6
Array = np.ndarray
Found = tuple[Array, int, float]
"""Solution, iterations, seconds of preparation."""


def right_side(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Noise on top of blocks and a smooth part: every part of the spectrum."""
    random = np.random.default_rng(seed)
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
    result = solve_dcdm(grid.apply, torch.from_numpy(right), net.direction, rtol=RTOL, max_iterations=100)
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
    begin = time.process_time()
    # Without pivoting and with a symmetric order the factors of a symmetric matrix stay nearly symmetric, as CG needs.
    factor = sparse_linalg.spilu(
        sparse.csc_array(matrix), drop_tol=1e-3, fill_factor=8, diag_pivot_thresh=0.0,
        options={"SymmetricMode": True}, permc_spec="MMD_AT_PLUS_A",
    )  # fmt: skip
    took = time.process_time() - begin
    return *counted_cg(matrix, right, sparse_linalg.LinearOperator(matrix.shape, factor.solve)), took


def pyamg_solver(grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet) -> Found:
    import pyamg

    begin = time.process_time()
    hierarchy = pyamg.ruge_stuben_solver(sparse.csr_matrix(matrix))
    took = time.process_time() - begin
    residuals: list[float] = []
    x = hierarchy.solve(right.ravel(), tol=RTOL, accel="cg", residuals=residuals)
    return x, len(residuals) - 1, took


Method = Callable[[PoissonGrid, sparse.csr_array, Array, DirectionNet], Found]
METHODS: dict[str, Method] = {
    "SOR, optimal ω": sor,
    "SSOR-PCG, optimal ω": ssor_pcg,
    "DCDM": dcdm,
    "SciPy cg": scipy_cg,
    "SciPy cg + spilu": scipy_ilu,
    "PyAMG Ruge-Stüben + cg": pyamg_solver,
}
SHAPES = {2: [(128, 128), (512, 512), (1001, 1001)], 3: [(48, 48, 48), (101, 101, 101)]}
SLOW = {"SOR, optimal ω": [(1001, 1001)], "SciPy cg + spilu": [(48, 48, 48), (101, 101, 101)]}
"""Where a method is left out: it would take the most of the run."""
LEFT_OUT = {
    2: "SOR is left out on 1001 × 1001: its 2,700 iterations or so would take the most of the run.",
    3: "SciPy's spilu is left out: its factorisation of 48 × 48 × 48 had not ended after two minutes.",
}
FEW = 200_000


def poisson(shape: tuple[int, ...], net: DirectionNet) -> list[dict[str, Any]]:
    grid, rows = PoissonGrid(shape), []
    matrix, seeds = grid.matrix(), range(3 if math.prod(shape) < FEW else 1)
    for name, method in METHODS.items():
        if shape in SLOW.get(name, ()):
            continue
        try:
            runs = [attempt(method, grid, matrix, right_side(shape, seed), net) for seed in seeds]
        except ImportError:
            continue
        rows.append({"method": name, **{key: median(run[key] for run in runs) for key in runs[0]}})
        print(shape, rows[-1], flush=True)
    plain = next(row["seconds"] for row in rows if row["method"] == "SciPy cg")
    return [{**row, "time / SciPy cg": row["seconds"] / plain} for row in rows]


def attempt(
    method: Method, grid: PoissonGrid, matrix: sparse.csr_array, right: Array, net: DirectionNet
) -> dict[str, float]:
    begin = time.process_time()
    x, iterations, prepared = method(grid, matrix, right, net)
    seconds = time.process_time() - begin
    residual = float(np.linalg.norm(matrix @ x - right.ravel()) / np.linalg.norm(right))
    return {"iterations": iterations, "seconds": seconds, "of these to prepare": prepared, "residual": residual}


CHANNELS = 16
TRAINING: dict[int, list[tuple[tuple[int, ...], int, int, float]]] = {
    # Sides, steps, right-hand sides a step, learning rate. Small grids teach what a level does; what stays wrong there shows,
    # multiplied, on grids that are deeper, so that some steps on large ones have to follow.
    2: [
        ((32, 33, 47, 63, 64), 1500, 10, 2e-3),
        ((125, 126, 181, 251), 100, 4, 1e-3),
        ((251, 301, 501), 60, 2, 5e-4),
    ],
    3: [((15, 16, 21, 24, 33, 40), 500, 4, 2e-3)],
}


def trained(num_dims: int, quick: bool, kept: Path | None) -> tuple[DirectionNet, str]:
    """Return a network, read from the file `kept` where there is one, else trained and written there."""
    random = torch.Generator().manual_seed(0)
    net = DirectionNet(num_dims, channels=CHANNELS, seed=random)
    if kept is not None and kept.exists():
        found = torch.load(kept, weights_only=True)
        net.load_state_dict(found["net"])
        return net, found["text"]
    begin, parts = time.process_time(), []
    for sides, num_steps, batch, rate in TRAINING[num_dims][: 1 if quick else None]:
        result = train_direction_net(
            net, [PoissonGrid((side,) * num_dims) for side in sides], max_iterations=200 if quick else num_steps, batch_size=batch,
            learning_rate=rate, seed=random,
        )  # fmt: skip
        parts.append(f"{result.nit} steps of {batch} on sides {sides} (last loss {result.fun:.4f})")
        print(parts[-1], flush=True)
    seconds = time.process_time() - begin
    text = (
        f"DCDM in {num_dims} dimensions: {CHANNELS} channels, all levels share their weights, trained for {', then '.join(parts)}, "
        f"{seconds:.0f} s in all (not in the table)."
    )
    if kept is not None:
        torch.save({"net": net.state_dict(), "text": text}, kept)
    return net, text


def poisson_tables(num_dims: int, quick: bool, kept: Path | None) -> None:
    net, about_training = trained(num_dims, quick, kept)
    print(about_training, flush=True)
    remarks = [CPU_SECONDS, LEFT_OUT[num_dims], about_training]
    sections: dict[str, Any] = {}
    for shape in SHAPES[num_dims][: 1 if quick else None]:
        sections[f"Poisson, {' × '.join(map(str, shape))}"] = poisson(shape, net)
        write(f"solvers-linear-poisson-{num_dims}d", sections, remarks, packages=("pyamg",), keep=not quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("poisson-2d", "poisson-3d", "streams", "heat"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--network", type=Path, metavar="FILE", help="Of DCDM: read from there, or trained and written."
    )
    parser.add_argument("--train-only", action="store_true", help="Write the network, solve nothing.")
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    num_dims = 2 if arguments.what == "poisson-2d" else 3
    if arguments.what == "streams":
        linear_streams.tables(arguments.quick)
    elif arguments.what == "heat":
        linear_heat.tables(arguments.quick)
    elif arguments.train_only:
        trained(num_dims, arguments.quick, arguments.network)
    else:
        poisson_tables(num_dims, arguments.quick, arguments.network)


if __name__ == "__main__":
    main()
