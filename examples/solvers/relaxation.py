"""Learning to relax: bandits choose ω for a stream of diffusion systems, and come near the best ω for each.

python examples/solvers/relaxation.py --out relaxation.html
"""

from __future__ import annotations

import argparse

import numpy as np
from plotly import graph_objects as go
from plotly.subplots import make_subplots
from scipy import sparse

from trainwright.solvers.linear import (
    OMEGAS,
    ChebCB,
    PoissonGrid,
    TsallisINF,
    TsallisINFCB,
    Tuner,
    solve_sor,
    solve_stream,
)

COLOURS = {"Tsallis-INF": "#888888", "Tsallis-INF-CB": "#d97706", "ChebCB": "#2563eb"}
System = tuple[sparse.csr_array, np.ndarray, float]


def diffusion_systems(num: int, side: int, seed: int = 0) -> list[System]:
    """The Laplacian on a grid plus c I, where c differs from system to system, and is what the tuners are told."""
    random, laplace = np.random.default_rng(seed), PoissonGrid((side, side)).matrix()
    least = laplace.shape[0]
    shifts = -0.15 + 0.6 * random.beta(0.5, 1.5, size=num)
    return [
        (sparse.csr_array(laplace + shift * sparse.eye_array(least)), random.normal(size=least), float(shift))
        for shift in shifts
    ]


def smooth(costs: list[int], width: int = 40) -> np.ndarray:
    return np.convolve(costs, np.ones(width) / width, mode="valid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="relaxation.html")
    parser.add_argument("--num-systems", type=int, default=500)
    parser.add_argument("--side", type=int, default=10)
    arguments = parser.parse_args()
    systems = diffusion_systems(arguments.num_systems, arguments.side)
    tuners: dict[str, Tuner] = {
        "Tsallis-INF": TsallisINF(seed=0),
        "Tsallis-INF-CB": TsallisINFCB(-0.15, 0.45, seed=0),
        "ChebCB": ChebCB(-0.15, 0.65, seed=0),
    }
    figure = make_subplots(1, 2, subplot_titles=("Iterations a system, running mean", "The ω chosen for a context"))
    for name, tuner in tuners.items():
        stream = solve_stream(systems, tuner)
        figure.add_trace(go.Scatter(y=smooth(stream.costs), name=name, line={"color": COLOURS[name]}), 1, 1)
        print(f"{name}: {stream.mean_cost(100):.1f} iterations over the last 100 systems")
    shifts = [context for *_, context in systems[-250:]]
    figure.add_trace(
        go.Scatter(x=shifts, y=stream.omegas[-250:], mode="markers", name="ChebCB, last 250", opacity=0.5,
                   marker={"color": COLOURS["ChebCB"]}), 1, 2
    )  # fmt: skip
    fixed = {omega: np.mean([solve_sor(A, b, omega).nit for A, b, _ in systems[::25]]) for omega in OMEGAS[8::3]}
    best = min(fixed, key=lambda omega: float(fixed[omega]))
    figure.add_scatter(
        x=[0, len(systems)], y=[fixed[best]] * 2, mode="lines", name=f"best fixed, ω = {best:.2f}",
        line={"color": "#111111", "dash": "dash"}, row=1, col=1,
    )  # fmt: skip
    print(f"best fixed ω = {best:.2f}: {fixed[best]:.1f} iterations")
    figure.update_yaxes(title="iterations", row=1, col=1)
    figure.update_yaxes(title="ω", row=1, col=2)
    figure.update_layout(title="SOR on a stream of diffusion systems: ω learned on the way", template="plotly_white")
    figure.update_xaxes(title="system", row=1, col=1)
    figure.update_xaxes(title="context: the shift c", row=1, col=2)
    figure.write_html(arguments.out, include_plotlyjs=True)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
