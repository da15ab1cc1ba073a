"""Sketched SQP on a curved constraint: the iterates, and the KKT residual against the rows read by exact and inexact steps.

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
    "Kaczmarz, the authors' tolerance": (SqpOptions(sketch="kaczmarz"), "#2563eb"),
    "Kaczmarz, psi_scale 1e-8": (SqpOptions(sketch="kaczmarz", psi_scale=1e-8), "#d97706"),
    "Kaczmarz, psi_scale 1e-10": (SqpOptions(sketch="kaczmarz", psi_scale=1e-10), "#059669"),
    "Gaussian, psi_scale 1e-8": (SqpOptions(sketch="gaussian", psi_scale=1e-8), "#888888"),
}
STARTS = ((-2.2, -0.8), (-1.0, 2.2), (2.4, 2.0))


def valley(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 2 * (x[1] - x[0] ** 2) ** 2


def ellipse(x: Tensor) -> Tensor:
    return (x[0] ** 2 / 4 + x[1] ** 2 - 1.3).reshape(1)


def draw_paths(figure: go.Figure) -> None:
    """Level lines of the objective, the constraint, and the iterates from some starts."""
    axis = np.linspace(-2.6, 2.6, 121)
    points = torch.tensor(np.stack(np.meshgrid(axis, axis)))
    levels = torch.log1p(valley(points)).numpy()
    figure.add_contour(x=axis, y=axis, z=levels, showscale=False, colorscale="Blues", opacity=0.6, row=1, col=1)
    angle = np.linspace(0, 2 * np.pi, 200)
    radius = np.sqrt(1.3)
    line = {"color": "#111111"}
    figure.add_scatter(x=2 * radius * np.cos(angle), y=radius * np.sin(angle), name="c(x) = 0", line=line, row=1, col=1)
    for start in STARTS:
        path: list[np.ndarray] = []

        def keep(moment: Any, path: list[np.ndarray] = path) -> None:
            path.append(moment.state.x)

        solve_ai_sqp(valley, start, ellipse, callback=keep)
        x, y = np.array(path).T
        look = {"mode": "lines+markers", "line": {"color": "#dc2626"}, "showlegend": start is STARTS[0]}
        figure.add_scatter(x=x, y=y, name="iterates", row=1, col=1, **look)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="constrained.html")
    arguments = parser.parse_args()
    figure = make_subplots(1, 2, subplot_titles=("iterates from three starts", "KKT residual from the first start"))
    draw_paths(figure)
    for name, (options, color) in METHODS.items():
        result = solve_ai_sqp(valley, STARTS[0], ellipse, options=options, keep_history=True)
        actions, residuals = result.history["num_sketches"], result.history["residual"]
        figure.add_scatter(x=actions[1:], y=residuals[1:], name=name, line={"color": color}, row=1, col=2)
        print(f"{name}: {result.nit} iterations, {result.num_sketches} row actions, x = {np.round(result.x, 5)}")
    figure.update_xaxes(title="x₁", row=1, col=1)
    figure.update_yaxes(title="x₂", row=1, col=1)
    figure.update_yaxes(type="log", exponentformat="power", dtick=4, row=1, col=2)
    figure.update_xaxes(type="log", exponentformat="power", dtick=1, title="rows of KKT systems read", row=1, col=2)
    figure.update_layout(title="Sketched SQP: looser Newton systems, fewer rows", template="plotly_white")
    figure.write_html(arguments.out, include_plotlyjs=True)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
