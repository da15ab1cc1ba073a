"""Saddle points of finite sums: SPIDER-GDA, AccSPIDER-GDA, SVRG-GDA and full-batch descent ascent at equal component gradients.

    python -m benchmarks.solvers.minimax [--quick]

Games with fᵢ of rank one and a PL condition number κ; steps from one grid for all, the lowest end counts.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.minimax import GDA, SVRGGDA, AccSpiderGDA, SpiderGDA, minimax

DIM, RANK, PASSES = 10, 5, 48
GRID = (0.03, 0.1, 0.3)


class Game:
    """½ (p·x)² − ½ (q·y)² + (r·x)(s·y), averaged over n draws; saddle at 0."""

    def __init__(self, num: int, condition: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        spectrum = torch.linspace(1 / condition, 1, RANK, dtype=torch.float64).sqrt()

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        bases = [torch.linalg.qr(normal(DIM, DIM))[0][:, :RANK] * spectrum for _ in range(2)]
        self.p, self.q = (normal(num, RANK) @ basis.T for basis in bases)
        mixed = normal(num, RANK)
        self.r, self.s = (0.3**0.5 * mixed @ basis.T for basis in bases)
        self.x, self.y, self.num = normal(DIM), normal(DIM), num

    def jac(self, x: Tensor, y: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        p, q, r, s, num = self.p[indices], self.q[indices], self.r[indices], self.s[indices], len(indices)
        return (p.T @ (p @ x) + r.T @ (s @ y)) / num, (s.T @ (r @ x) - q.T @ (q @ y)) / num


def methods(num: int, step_x: float, step_y: float) -> dict[str, Any]:
    """Every method at these steps; a full-batch step may be as much larger as its smoothness is lower (tenfold)."""
    root = round(num**0.5)
    shared: dict[str, Any] = {"batches": "shared"}
    last = SpiderGDA(step_x, step_y, output_rule="last", **shared)
    return {
        "GDA": GDA(10 * step_x, 10 * step_y),
        "SVRG-GDA, B=1": SVRGGDA(step_x, step_y, output_rule="last", **shared),
        "SPIDER-GDA, B=1, last": last,
        "SPIDER-GDA, B=1, uniform": SpiderGDA(step_x, step_y, **shared),
        "SPIDER-GDA, B=M=√n, last": SpiderGDA(
            3 * step_x,
            3 * step_y,
            batch_size=root,
            period=root,
            num_inner=num // root * root,
            output_rule="last",
            **shared,
        ),
        "AccSPIDER-GDA, β=0.05, γ=0.9": AccSpiderGDA(last, beta=0.05, gamma=0.9),
    }


def best(game: Game, name: str) -> dict[str, float]:
    """Return the lowest gradient norm over the grid within the passes, with the time and calls of that run."""
    found: dict[str, float] = {"norm": float("inf")}
    for step_x in GRID:
        for step_y in GRID:
            method = methods(game.num, step_x, step_y)[name]
            began = time.process_time()
            result = minimax(
                None, game.x, game.y, game.num, method=method, jac=game.jac, max_iterations=10**9,
                max_evaluations=PASSES * game.num,
            )  # fmt: skip
            if result.grad_norm < found["norm"]:
                seconds = time.process_time() - began
                found = {"norm": result.grad_norm, "seconds": seconds, "nsfo": result.nsfo, "x": step_x, "y": step_y}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few components")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    num, seeds = (200, 1) if quick else (300, 3)
    sections = {}
    for condition in (20.0, 200.0):
        games = [Game(num, condition, seed) for seed in range(seeds)]
        full = [best(game, "GDA")["norm"] for game in games]
        rows = []
        for name in methods(num, 0.1, 0.1):
            runs = [best(game, name) for game in games]
            rows.append(
                {
                    "method": name,
                    "‖∇f‖ at the end": median(run["norm"] for run in runs),
                    "ratio to GDA": median(run["norm"] / of for run, of in zip(runs, full)),
                    "passes": median(run["nsfo"] / num for run in runs),
                    "seconds": median(run["seconds"] for run in runs),
                    "steps (x, y)": f"{runs[0]['x']}, {runs[0]['y']}",
                }
            )
        sections[f"condition {condition:g}, n = {num}, {PASSES} passes, medians of {seeds} seeds"] = rows
    write(
        "solvers-minimax",
        sections,
        [
            CPU_SECONDS,
            "An inner step counts two gradients per component of its batch; measuring the norm at a run's end counts as a pass.",
            "Step sizes from one 3×3 grid per method and game (GDA: ten times the grid); the best end is reported.",
            "SPIDER-GDA and SVRG-GDA change places with the game; the theory's gain over SVRG is only n^(1/6).",
        ],
        keep=not quick,
    )


if __name__ == "__main__":
    main()
