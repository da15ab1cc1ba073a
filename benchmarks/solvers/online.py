"""Regret of optimistic learners against gradient descent and AdaGrad, from independent noise to pure drift.

python -m benchmarks.solvers.online [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.solvers.record import write
from trainwright.solvers.online import (
    OGD,
    AdaGradNorm,
    Ball,
    DynamicOMD,
    Learner,
    OptimisticFTL,
    OptimisticFTRL,
    OptimisticOMD,
    play,
)

NUM_DIMS, BOUND, CONVEXITY = 5, 3.0, 0.5
BALL = Ball(NUM_DIMS)
Environment = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def environment(
    num_rounds: int, num_seeds: int, noise: float, num_flips: int, convexity: float
) -> tuple[Environment, Tensor]:
    """Return (x − mₜ)'A(x − mₜ)/2 with noisy gradients, m flipping its sign, and the comparator."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(convexity, 1, NUM_DIMS, dtype=torch.float64)
    means = torch.randn(num_seeds, NUM_DIMS, generator=generator, dtype=torch.float64)
    means = 0.8 * torch.nn.functional.normalize(means, dim=-1)
    noises = torch.randn(num_rounds, num_seeds, NUM_DIMS, generator=generator, dtype=torch.float64)
    noises *= noise / NUM_DIMS**0.5

    def at(t: int, x: Tensor) -> tuple[Tensor, Tensor]:
        offset = x - means * (-1) ** (t * (num_flips + 1) // num_rounds)
        return (scales * offset**2).sum(-1) / 2, scales * offset + noises[t]

    return at, torch.zeros(NUM_DIMS) if num_flips else means


def learners(num_rounds: int, num_seeds: int, convexity: float) -> dict[str, Learner]:
    """Return fresh learners; strongly convex ones where the losses are."""
    shape = (num_seeds,)
    found: dict[str, Learner] = {
        "OptimisticOMD": OptimisticOMD(BALL, gradient_bound=BOUND, batch_shape=shape),
        "OptimisticFTRL": OptimisticFTRL(BALL, gradient_bound=BOUND, smoothness=1.0, batch_shape=shape),
        "DynamicOMD": DynamicOMD(BALL, gradient_bound=BOUND, smoothness=1.0, num_rounds=num_rounds, batch_shape=shape),
        "OGD": OGD(BALL, gradient_bound=BOUND, batch_shape=shape),
        "AdaGradNorm": AdaGradNorm(BALL, batch_shape=shape),
    }
    if convexity > 0:
        found["OptimisticOMD, strongly convex"] = OptimisticOMD(BALL, strong_convexity=convexity, batch_shape=shape)
        found["OptimisticFTL, strongly convex"] = OptimisticFTL(BALL, strong_convexity=convexity, batch_shape=shape)
        found["OGD, strongly convex"] = OGD(BALL, strong_convexity=convexity, batch_shape=shape)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    quick = parser.parse_args().quick
    num_rounds = 500 if quick else 8000
    torch.set_num_threads(1)
    num_seeds, sections = 9, {}
    for heading, noise, num_flips, convexity in (
        ("no noise, one function", 0.0, 0, 0.0),
        ("independent noise 0.5", 0.5, 0, 0.0),
        ("drift: 20 flips, no noise", 0.0, 20, 0.0),
        ("drift and noise: 20 flips, noise 0.5", 0.5, 20, 0.0),
        ("strongly convex, noise 0.5", 0.5, 0, CONVEXITY),
    ):
        rows = []
        for name, learner in learners(num_rounds, num_seeds, convexity).items():
            at, comparator = environment(num_rounds, num_seeds, noise, num_flips, convexity)
            began = time.perf_counter()
            regrets = play(learner, at, max_iterations=num_rounds, comparator=comparator).regrets
            assert regrets is not None
            microseconds = 1e6 * (time.perf_counter() - began) / num_rounds
            rows.append(
                {
                    "learner": name,
                    "regret at T/4": float(regrets[num_rounds // 4].median()),
                    "regret at T": float(regrets[-1].median()),
                    "µs a round": microseconds,
                }
            )
        sections[f"{heading} (T = {num_rounds}, medians of {num_seeds} seeds)"] = rows
    remarks = [
        "Regret against the best fixed point of the expected losses, so it may be negative under drift; lower is better.",
        "In independent noise OGD wins; against drift the optimistic learners and AdaGradNorm do, by much.",
    ]
    write("solvers-online", sections, remarks, keep=not quick)


if __name__ == "__main__":
    main()
