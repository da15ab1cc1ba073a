"""Train a small direction network on 32 × 32 and solve a larger Poisson problem with it, beside CG and SSOR-PCG.

python examples/solvers/deep_conjugate_directions.py --out directions.html
"""

from __future__ import annotations

import argparse
import math

import torch
from plotly.subplots import make_subplots

from trainwright.solvers.linear import (
    DirectionNet,
    LinearResult,
    PoissonGrid,
    optimal_omega,
    solve_dcdm,
    solve_ssor_pcg,
    train_direction_net,
)

COLOURS = {"DCDM": "#2563eb", "CG": "#888888", "SSOR-PCG, optimal ω": "#d97706"}


def charges(side: int) -> torch.Tensor:
    """A few point charges and a band."""
    right = torch.zeros(side, side, dtype=torch.float64)
    for row, column, charge in ((0.2, 0.3, 1.0), (0.7, 0.75, -1.0), (0.8, 0.2, 0.6)):
        right[int(row * side), int(column * side)] = charge * side
    right[side // 2 - 2 : side // 2 + 2, side // 4 : 3 * side // 4] = 0.3
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="directions.html")
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--num-steps", type=int, default=200)
    arguments = parser.parse_args()
    random = torch.Generator().manual_seed(0)
    net = DirectionNet(2, channels=8, seed=random)
    training = train_direction_net(
        net, [PoissonGrid((32, 32))], max_iterations=arguments.num_steps, learning_rate=4e-3, seed=random
    )
    print(f"loss {training.fun:.4f} after {training.nit} steps")
    grid, right = PoissonGrid((arguments.side, arguments.side)), charges(arguments.side)
    omega = optimal_omega(math.cos(math.pi / (arguments.side + 1)))
    results: dict[str, LinearResult] = {
        "DCDM": solve_dcdm(grid.apply, right, net.direction, max_iterations=300, keep_history=True),
        "CG": solve_dcdm(grid.apply, right, lambda r: r, max_iterations=3000, keep_history=True),
        "SSOR-PCG, optimal ω": solve_ssor_pcg(grid.matrix(), right.reshape(-1), omega, rtol=1e-6, keep_history=True),
    }
    figure = make_subplots(1, 2, subplot_titles=("Residual against that at the start", "The solution of DCDM"))
    for name, result in results.items():
        residuals = result.history["residual"]
        figure.add_scatter(
            x=list(range(1, len(residuals))), y=[r / residuals[0] for r in residuals[1:]], name=name,
            line={"color": COLOURS[name]}, row=1, col=1,
        )  # fmt: skip
        print(f"{name}: {result.nit} iterations")
    figure.add_heatmap(z=results["DCDM"].x.numpy(), colorscale="RdBu", zmid=0, row=1, col=2)
    figure.update_yaxes(type="log", exponentformat="power", row=1, col=1)
    figure.update_xaxes(type="log", dtick=1, title="iteration", row=1, col=1)
    figure.update_layout(
        title=f"A Poisson problem on {arguments.side} × {arguments.side} points, a network trained on 32 × 32",
        template="plotly_white", legend={"x": 0.0, "y": 0.05},
    )  # fmt: skip
    figure.write_html(arguments.out, include_plotlyjs=True)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
