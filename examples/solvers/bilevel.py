"""Two-level problems: norm of the true hypergradient against oracle calls, for many blocks and for a steep upper level.

python examples/solvers/bilevel.py --out bilevel.html
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from trainwright.solvers.bilevel import BOREP, BSVRB, BilevelResult, bilevel

NUM_BLOCKS, NUM_SAMPLED = 20, 5


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def many_blocks(method: BSVRB, num_calls: int) -> BilevelResult:
    """Ridge-like tasks that share x, five of twenty a step; every gradient and product carries noise."""
    generator = torch.Generator().manual_seed(3)
    roots = draw(generator, NUM_BLOCKS, 6, 6)
    A = 0.1 * roots @ roots.mT + 0.6 * torch.eye(6, dtype=torch.float64)
    B, c = draw(generator, NUM_BLOCKS, 6, 5) / 2, draw(generator, NUM_BLOCKS, 6) + 1

    def sample(blocks: Tensor, generator: torch.Generator) -> Any:
        return [0.3 * draw(generator, len(blocks), *shape) for shape in ((6,), (6,), (5,), (6, 6))]

    def lower(x: Tensor, y: Tensor, blocks: Tensor, noise: Any) -> Tensor:
        near = y - y.detach()  # zero, so that its square is noise on the Hessian alone
        value = torch.einsum("ia,iab,ib->i", y, A[blocks], y) / 2 - torch.einsum("ia,iax,x->i", y, B[blocks], x)
        return value + (y * noise[0]).sum(1) + torch.einsum("ia,iab,ib->i", near, noise[3], near) / 2

    def upper(x: Tensor, y: Tensor, blocks: Tensor, noise: Any) -> Tensor:
        value = (y - c[blocks]).square().sum(1) / 2 + 0.05 * x.square().sum()
        return value + (y * noise[1]).sum(1) + (x * noise[2]).sum(1)

    def grad_norm(x: Tensor) -> float:
        y = torch.linalg.solve(A, torch.einsum("iax,x->ia", B, x))
        return float((torch.einsum("iax,ia->ix", B, torch.linalg.solve(A, y - c)).mean(0) + 0.1 * x).norm())

    return bilevel(upper, lower, 2 + draw(generator, 5), draw(generator, NUM_BLOCKS, 6), method=method, sample=sample,
                   max_iterations=10**9, max_evaluations=num_calls, check_every=20, grad_norm=grad_norm,
                   keep_history=True)  # fmt: skip


def steep(method: BOREP, num_steps: int) -> BilevelResult:
    """An upper level that grows exponentially, started where its gradient is 2e5."""
    A = torch.diag(torch.linspace(1.0, 3.0, 8, dtype=torch.float64))
    B = torch.linalg.qr(draw(torch.Generator().manual_seed(5), 8, 8))[0]

    def lower(x: Tensor, y: Tensor, blocks: Tensor, noise: Any) -> Tensor:
        return torch.einsum("ia,ab,ib->i", y, A, y) / 2 - torch.einsum("ia,ab,b->i", y, B, x)

    def upper(x: Tensor, y: Tensor, blocks: Tensor, noise: Any) -> Tensor:
        return ((y - 0.3).cosh() * noise).sum(1) + 0.02 * x.cosh().sum()

    def grad_norm(x: Tensor) -> float:
        y = torch.linalg.solve(A, B @ x)
        return float((B.T @ torch.linalg.solve(A, (y - 0.3).sinh()) + 0.02 * x.sinh()).norm())

    return bilevel(upper, lower, torch.full((8,), 6.0, dtype=torch.float64), torch.zeros(1, 8, dtype=torch.float64),
                   method=method, sample=lambda blocks, generator: 1 + 0.1 * draw(generator, 8), max_iterations=num_steps,
                   check_every=10, grad_norm=grad_norm,
                   keep_history=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bilevel.html"))
    out = parser.parse_args().out
    common: dict[str, Any] = {"step_x": 0.003, "step_y": 0.1, "num_sampled": NUM_SAMPLED, "curvature_floor": 0.5}
    plain: dict[str, Any] = {**common, "alpha": 1.0, "beta": 1.0, "gamma": 0.0}
    ours: dict[str, Any] = {**common, "alpha": 0.1, "beta": 0.1, "gamma": 0.9}
    panels: list[list[tuple[str, str, BilevelResult]]] = [
        [
            ("plain block steps", "#888888", many_blocks(BSVRB(**plain, version=1), 60_000)),
            ("BSVRB v1", "#d97706", many_blocks(BSVRB(**ours, version=1), 60_000)),
            ("BSVRB v2", "#2563eb", many_blocks(BSVRB(**ours, version=2), 60_000)),
        ],
        [
            ("momentum, η = 1e-5", "#888888", steep(BOREP(1e-5, 0.2, 0.1, normalised=False), 2400)),
            ("momentum, η = 1e-4", "#b91c1c", steep(BOREP(1e-4, 0.2, 0.1, normalised=False), 2400)),
            ("BO-REP, η = 0.01", "#2563eb", steep(BOREP(0.01, 0.2, 0.1), 2400)),
            ("BO-REP, decaying", "#16a34a", steep(BOREP(0.03, 0.2, 0.1, decay=0.9985), 2400)),
        ],
    ]
    figure = make_subplots(1, 2, subplot_titles=("20 noisy blocks, 5 a step", "a steep upper level (Σ cosh)"))
    for column, lines in enumerate(panels, 1):
        for name, color, result in lines:
            norms, calls = result.history["residual"], result.history["nfev"]
            figure.add_scatter(x=calls, y=norms, name=name, line={"color": color}, row=1, col=column,
                               legendgroup=str(column), legendgrouptitle_text=("left", "right")[column - 1])  # fmt: skip
            print(f"{name:20s} ‖∇F‖ = {norms[-1]:.3g} after {calls[-1]:.0f} calls: {result.message}")
    figure.update_xaxes(title="gradients and second-order products, one a block")
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title="norm of the true hypergradient", row=1, col=1)
    figure.update_yaxes(range=[-3, 6], row=1, col=2)
    figure.update_layout(title="min over x of F(x, y(x)): tracking and normalised steps", template="plotly_white")
    go.Figure(figure).write_html(out, include_plotlyjs=True)


if __name__ == "__main__":
    main()
