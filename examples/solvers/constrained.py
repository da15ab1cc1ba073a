"""Sketched SQP on a curved constraint: the path of the iterates, and the KKT residual of exact and inexact steps.

python examples/solvers/constrained.py --out constrained.html
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from plotly import graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from trainwright.solvers.constrained import SqpOptions, solve_ai_sqp

METHODS = {
    "Kaczmarz": SqpOptions(),
    "Kaczmarz, inexact (psi_scale 1e-5)": SqpOptions(psi_scale=1e-5),
    "Gaussian": SqpOptions(sketch="gaussian"),
    "exact": SqpOptions(sketch="exact"),
}


def valley(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 2 * (x[1] - x[0] ** 2) ** 2


def ellipse(x: Tensor) -> Tensor:
    return (x[0] ** 2 / 4 + x[1] ** 2 - 1.3).reshape(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="constrained.html")
    parser.add_argument("--start", type=float, nargs=2, default=(-2.2, -0.8))
    arguments = parser.parse_args()
    figure = make_subplots(1, 2, subplot_titles=("Iterates", "KKT residual"))
    axis = np.linspace(-2.6, 2.6, 121)
    points = torch.tensor(np.stack(np.meshgrid(axis, axis)))
    levels = torch.log1p(valley(points)).numpy()
    figure.add_trace(go.Contour(x=axis, y=axis, z=levels, showscale=False, colorscale="Blues", opacity=0.6), 1, 1)
    angle = np.linspace(0, 2 * np.pi, 200)
    radius = np.sqrt(1.3)
    figure.add_trace(go.Scatter(x=2 * radius * np.cos(angle), y=radius * np.sin(angle), name="c(x) = 0"), 1, 1)
    for name, options in METHODS.items():
        path: list[np.ndarray] = []

        def keep(moment: Any, path: list[np.ndarray] = path) -> None:
            path.append(moment.state.x)

        result = solve_ai_sqp(valley, arguments.start, ellipse, options=options, callback=keep, keep_history=True)
        x, y = np.array(path).T
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines+markers"), 1, 1)
        figure.add_trace(go.Scatter(y=result.history["residual"], name=name, showlegend=False), 1, 2)
        print(f"{name}: {result.nit} iterations, {result.num_sketches} row actions, x = {np.round(result.x, 5)}")
    figure.update_yaxes(type="log", exponentformat="power", row=1, col=2)
    figure.update_xaxes(title="iteration", row=1, col=2)
    figure.write_html(arguments.out, include_plotlyjs="cdn")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
