"""Consensus-based optimisation of the Rastrigin function: the particles over time, and the hops of consensus hopping.

python examples/solvers/consensus.py --out consensus.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from trainwright.solvers.consensus import CBO, ConsensusHopping, Swarm

LOW, HIGH = -3.0, 5.0


def rastrigin(x: Tensor) -> Tensor:
    return (x**2 - 10 * torch.cos(2 * torch.pi * x) + 10).sum(1)


def contour() -> go.Contour:
    axis = torch.linspace(LOW, HIGH, 160)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    values = rastrigin(grid.view(-1, 2)).view(160, 160)
    return go.Contour(
        x=axis.tolist(),
        y=axis.tolist(),
        z=values.tolist(),
        colorscale="Blues",
        showscale=False,
        opacity=0.6,
        ncontours=25,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("consensus.html"))
    out = parser.parse_args().out
    bounds = [(LOW, HIGH)] * 2
    figure = make_subplots(
        1, 2, subplot_titles=("CBO: particles (slider: steps)", "consensus hopping: way of the consensus")
    )
    for col in (1, 2):
        figure.add_trace(contour(), row=1, col=col)

    swarm = Swarm(bounds, method=CBO(noise=0.7, alpha=100.0, diffusion="isotropic"), num_particles=150, seed=1)
    frames = []
    for num in range(301):
        points = swarm.ask()
        swarm.tell(rastrigin(points))
        if num % 10 == 0:
            look = {"size": 5, "color": "#d97706"}
            cloud = go.Scatter(
                x=points[:, 0].tolist(), y=points[:, 1].tolist(), mode="markers", marker=look, name="particles"
            )
            frames.append(go.Frame(name=str(num), data=[cloud], traces=[2]))
    figure.add_trace(frames[0].data[0], row=1, col=1)
    figure.frames = frames
    print(f"CBO: consensus {swarm.consensus.tolist()}, best value {swarm.best_fun:.3g}")

    x0 = torch.tensor([4.0, 4.0], dtype=torch.float64)
    method = ConsensusHopping(noise=0.6, alpha=100.0, decay=0.7, decay_every=20)
    hopper = Swarm(bounds, x0=x0, method=method, num_particles=100, seed=1)
    way = [x0.tolist()]
    for _ in range(120):
        hopper.tell(rastrigin(hopper.ask()))
        way.append(hopper.consensus.tolist())
    x, y = zip(*way)
    figure.add_scatter(x=x, y=y, mode="lines+markers", line={"color": "#2563eb"}, name="consensus", row=1, col=2)
    print(f"hopping: consensus {hopper.consensus.tolist()}, best value {hopper.best_fun:.3g}")

    steps = [
        {
            "label": frame.name,
            "method": "animate",
            "args": [[frame.name], {"mode": "immediate", "frame": {"duration": 0}}],
        }
        for frame in frames
    ]
    figure.update_xaxes(range=[LOW, HIGH], title="x₁")
    figure.update_yaxes(range=[LOW, HIGH], title="x₂")
    figure.update_layout(
        title="Global minimisation from values alone: Rastrigin (the lighter, the lower)", template="plotly_white",
        sliders=[{"steps": steps, "currentvalue": {"prefix": "step "}, "pad": {"t": 40}}],
    )  # fmt: skip
    figure.write_html(out, include_plotlyjs=True, auto_play=False)


if __name__ == "__main__":
    main()
