"""Two-layer ReLU networks by a convex programme: the fit over all patterns and over few, and the way to the optimum.

python examples/solvers/convex_nets.py --out convex_nets.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from trainwright.solvers.convex_nets import enumerate_patterns, sample_patterns, solve_relu_programme

NUM, BETA = 30, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("convex_nets.html"))
    out = parser.parse_args().out
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 3, NUM, dtype=torch.float64)
    y = torch.sin(2 * x) + 0.3 + 0.1 * torch.randn(NUM, generator=generator, dtype=torch.float64)
    X = torch.stack([x, torch.ones_like(x)], 1)
    fine = torch.linspace(-1.5, 3.5, 400, dtype=torch.float64)
    figure = make_subplots(1, 2, horizontal_spacing=0.14, subplot_titles=("the networks", "the way to the optimum"))
    figure.add_scatter(x=x.tolist(), y=y.tolist(), mode="markers", name="data", marker={"color": "#111"}, row=1, col=1)
    choices = {
        "all patterns": (enumerate_patterns(X), "#2563eb"),
        "20 drawn": (sample_patterns(X, 20, generator), "#d97706"),
        "5 drawn": (sample_patterns(X, 5, generator), "#888888"),
    }
    for name, (patterns, color) in choices.items():
        found = solve_relu_programme(X, y, patterns, BETA, rtol=1e-5, keep_history=True)
        line = {"color": color}
        outputs = found.x(torch.stack([fine, torch.ones_like(fine)], 1))
        label = f"{name} ({patterns.shape[1]} kept): objective {found.fun:.3f}"
        figure.add_scatter(x=fine.tolist(), y=outputs.tolist(), name=label, line=line, row=1, col=1)
        history = found.history
        figure.add_scatter(x=history["nit"], y=history["residual"], line=line, showlegend=False, row=1, col=2)
        print(f"{name:13s} {patterns.shape[1]:3d} patterns, {found.nit} iterations, objective {found.fun:.4f}, "
              f"{found.x.output.numel()} units")  # fmt: skip
    figure.update_xaxes(title="x", row=1, col=1)
    figure.update_yaxes(title="y", row=1, col=1)
    figure.update_xaxes(title="iteration", row=1, col=2)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1, title="primal + dual residual", row=1, col=2)
    figure.update_layout(title="Two-layer ReLU networks by ADMM", template="plotly_white")
    go.Figure(figure).write_html(out, include_plotlyjs=True)


if __name__ == "__main__":
    main()
