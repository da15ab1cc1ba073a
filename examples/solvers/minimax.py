"""Saddle point of a finite sum: gradient norm against component gradients, and the way of the iterates.

python examples/solvers/minimax.py --out minimax.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from trainwright.solvers.minimax import GDA, SVRGGDA, SpiderGDA, minimax

NUM, PASSES = 300, 24


def fun(x: Tensor, y: Tensor, indices: Tensor) -> Tensor:
    """A robust line fit: weights x against an adversary y that shifts the data, at a price."""
    inputs, targets = DATA[indices, :2], DATA[indices, 2]
    errors = (inputs + y) @ x - targets
    return (errors**2).mean() / 2 + 0.05 * x @ x - 2.0 * y @ y


def data() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.4])
    noise = 0.3 * torch.randn(NUM, 1, generator=generator, dtype=torch.float64)
    return torch.cat([inputs, inputs @ torch.tensor([[1.0], [-0.7]], dtype=torch.float64) + noise], 1)


DATA = data()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("minimax.html"))
    out = parser.parse_args().out
    start = torch.tensor([-1.5, 1.5], dtype=torch.float64)
    methods = {
        "full-batch GDA": GDA(0.5, 0.1),
        "SVRG-GDA": SVRGGDA(0.05, 0.02, batch_size=4, period=NUM // 4, output_rule="last", batches="shared"),
        "SPIDER-GDA": SpiderGDA(0.05, 0.02, batch_size=4, period=NUM // 4, output_rule="last", batches="shared"),
    }
    figure = make_subplots(1, 2, subplot_titles=("norm of the full gradient", "way of x"))
    for place, (name, method) in enumerate(methods.items()):
        way: list[list[float]] = []
        result = minimax(
            fun, start, 0 * start, NUM, method=method, max_iterations=10**6, max_evaluations=PASSES * NUM, keep_history=True,
            callback=lambda moment, way=way: way.append(moment.state.x.tolist()),
        )  # fmt: skip
        passes = [calls / NUM for calls in result.history["nsfo"]]
        look = {"color": ("#888888", "#d97706", "#2563eb")[place]}
        figure.add_scatter(
            x=passes, y=result.history["residual"], name=name, mode="lines+markers", line=look, row=1, col=1
        )
        x, y = zip(*way)
        figure.add_scatter(x=x, y=y, name=name, mode="lines+markers", line=look, showlegend=False, row=1, col=2)
        print(f"{name:15s} ‖∇f‖ = {result.grad_norm:.2e} after {result.nsfo / NUM:.0f} passes, x = {result.x.tolist()}")
    figure.update_xaxes(title="component gradients / n", row=1, col=1)
    figure.update_yaxes(type="log", dtick=1, exponentformat="power", row=1, col=1)
    figure.update_xaxes(title="x₁", row=1, col=2)
    figure.update_yaxes(title="x₂", row=1, col=2)
    figure.update_layout(
        title="min over x, max over y: variance reduction at equal component gradients", template="plotly_white"
    )
    go.Figure(figure).write_html(out, include_plotlyjs=True)


if __name__ == "__main__":
    main()
