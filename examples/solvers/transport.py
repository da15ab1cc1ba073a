"""How Sinkhorn-Newton-Sparse leaves Sinkhorn behind: marginal error over passes, and the plan that comes out.

python examples/solvers/transport.py --out transport.html
"""

from __future__ import annotations

import argparse

import torch
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from trainwright.solvers.transport import SnsOptions, TransportResult, solve_sinkhorn, solve_sns

COLOURS = {"SNS, adaptive": "#2563eb", "SNS, five entries a row": "#d97706", "Sinkhorn, log domain": "#888888"}


def two_piles(num_points: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two distributions on [0, 1], one hump and two humps, and the squared distance."""
    place = torch.linspace(0, 1, num_points, dtype=torch.float64)
    one = (-200 * (place - 0.35) ** 2).exp() + 0.02
    two = (-300 * (place - 0.25) ** 2).exp() + 0.7 * (-300 * (place - 0.8) ** 2).exp() + 0.02
    return one / one.sum(), two / two.sum(), (place[:, None] - place) ** 2


def error_over_passes(result: TransportResult, name: str) -> go.Scatter:
    return go.Scatter(x=result.history["nfev"], y=result.history["residual"], name=name, line={"color": COLOURS[name]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="transport.html")
    parser.add_argument("--num-points", type=int, default=200)
    parser.add_argument("--reg", type=float, default=1e-3)
    arguments = parser.parse_args()
    a, b, cost = two_piles(arguments.num_points)
    newton = solve_sns(a, b, cost, arguments.reg, atol=1e-12, keep_history=True)
    paper = solve_sns(
        a, b, cost, arguments.reg, atol=1e-12, keep_history=True, max_iterations=120, options=SnsOptions(adaptive=False)
    )
    sinkhorn = solve_sinkhorn(a, b, cost, arguments.reg, atol=1e-12, keep_history=True, max_iterations=150)
    figure = make_subplots(1, 2, subplot_titles=("Error of the marginals", "The plan, by log10"))
    for result, name in zip((newton, paper, sinkhorn), COLOURS):
        figure.add_trace(error_over_passes(result, name), 1, 1)
    plan = newton.plan().clamp(min=1e-12).log10()
    figure.add_trace(go.Heatmap(z=plan.numpy(), colorscale="Viridis", colorbar={"x": 1.0}, zmin=-12), 1, 2)
    figure.update_yaxes(type="log", exponentformat="power", title="L1 error", row=1, col=1)
    figure.update_xaxes(title="passes over the cost", row=1, col=1)
    figure.update_xaxes(title="place in b", row=1, col=2)
    figure.update_yaxes(title="place in a", row=1, col=2)
    figure.update_layout(
        title=f"Entropic transport of one pile to two, reg = {arguments.reg:g}", template="plotly_white",
        legend={"x": 0.22, "y": 0.5},
    )  # fmt: skip
    figure.write_html(arguments.out, include_plotlyjs=True)
    print(f"{newton.num_sinkhorn} Sinkhorn and {newton.num_newton} Newton steps to {newton.marginal_error:.1e}")
    print(f"Sinkhorn after {sinkhorn.nit} steps: {sinkhorn.marginal_error:.1e}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
