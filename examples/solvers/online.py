"""Regret over time in independent noise and under drift: where optimism pays, and where it does not.

python examples/solvers/online.py --out online.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from plotly.subplots import make_subplots
from torch import Tensor

from trainwright.solvers.online import OGD, AdaGradNorm, Ball, OptimisticFTRL, OptimisticOMD, play

NUM_ROUNDS, NUM_DIMS = 1500, 5
COLOURS = {"OptimisticOMD": "#2563eb", "OptimisticFTRL": "#059669", "OGD": "#888888", "AdaGradNorm": "#d97706"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("online.html"))
    out = parser.parse_args().out
    cases = {"independent noise": (0.5, 0), "drift: the target flips 20 times": (0.0, 20), "both": (0.5, 20)}
    figure = make_subplots(1, 3, subplot_titles=list(cases))
    for col, (noise, num_flips) in enumerate(cases.values(), start=1):
        for name, regrets in regrets_of(noise, num_flips).items():
            figure.add_scatter(
                y=regrets[::5].tolist(), x=list(range(0, NUM_ROUNDS, 5)), name=name, line={"color": COLOURS[name]},
                showlegend=col == 1, row=1, col=col,
            )  # fmt: skip
            print(f"noise {noise}, {num_flips} flips: {name:15s} regret {float(regrets[-1]):8.2f}")
    figure.update_xaxes(title="round")
    figure.update_yaxes(title="regret against the best fixed point", col=1)
    figure.update_layout(title="Between stochastic and adversarial: regret, lower is better", template="plotly_white")
    figure.write_html(out, include_plotlyjs=True)


def regrets_of(noise: float, num_flips: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ball, scales = Ball(NUM_DIMS), torch.linspace(0, 1, NUM_DIMS, dtype=torch.float64)
    mean = torch.full((NUM_DIMS,), 0.8 / NUM_DIMS**0.5, dtype=torch.float64)
    noises = noise / NUM_DIMS**0.5 * torch.randn(NUM_ROUNDS, NUM_DIMS, generator=generator, dtype=torch.float64)

    def environment(t: int, x: Tensor) -> tuple[Tensor, Tensor]:
        offset = x - mean * (-1) ** (t * (num_flips + 1) // NUM_ROUNDS)
        return (scales * offset**2).sum() / 2, scales * offset + noises[t]

    learners = {
        "OptimisticOMD": OptimisticOMD(ball, gradient_bound=3.0),
        "OptimisticFTRL": OptimisticFTRL(ball, gradient_bound=3.0, smoothness=1.0),
        "OGD": OGD(ball, gradient_bound=3.0),
        "AdaGradNorm": AdaGradNorm(ball),
    }
    found = {}
    for name, learner in learners.items():
        comparator = torch.zeros(NUM_DIMS) if num_flips else mean
        regrets = play(learner, environment, max_iterations=NUM_ROUNDS, comparator=comparator).regrets
        assert regrets is not None
        found[name] = regrets
    return found


if __name__ == "__main__":
    main()
