"""Projection in the norm of a matrix onto a box or a simplex: descend until the face is found, then solve on the face.

min (z − x)'H(z − x) with z fixed where p touches its bound, and Σ z fixed for the simplex        `_on_face`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .descent import descend

Project = Callable[[Tensor], Tensor]


def project_in(metric: Tensor, x: Tensor, project: Project, bounds: tuple[Tensor, Tensor], keeps_sum: bool) -> Tensor:
    """Return argmin of (z − x)'H(z − x) over {low ≤ z ≤ high}, with the sum of any feasible point where `keeps_sum`.

    A candidate is accepted where a projected gradient step leaves it in place, so a wrong guess of the face costs time only.
    """
    largest = torch.linalg.eigvalsh(metric)[..., -1:]
    atol = (1e-12 if x.dtype == torch.float64 else 1e-6) * float(1 + x.abs().max())

    def gradient(at: Tensor) -> Tensor:
        return (metric @ (at - x).unsqueeze(-1)).squeeze(-1)

    point = project(x)
    for _ in range(200):
        point = descend(gradient, project, point, largest, atol, 4)
        exact = project(_on_face(metric, x, point, (point > bounds[0]) & (point < bounds[1]), keeps_sum))
        moved = (project(exact - gradient(exact) / largest) - exact).norm(dim=-1)
        if bool((moved <= atol).all()):
            return exact
        point = torch.where((moved <= atol).unsqueeze(-1), exact, point)
    return point


def _on_face(metric: Tensor, x: Tensor, point: Tensor, free: Tensor, keeps_sum: bool) -> Tensor:
    """Return the minimiser with the entries that are not free kept as in `point`."""
    num_dims = x.shape[-1]
    fixed_part = torch.where(free, 0.0, point - x)
    system = metric * (free.unsqueeze(-1) & free.unsqueeze(-2)) + torch.diag_embed((~free).to(metric))
    target = torch.where(free, -(metric @ fixed_part.unsqueeze(-1)).squeeze(-1), fixed_part)
    if keeps_sum:
        border = free.to(metric).unsqueeze(-1)
        corner = (~free.any(-1)).to(metric)[..., None, None]
        system = torch.cat([torch.cat([system, border], -1), torch.cat([border.mT, corner], -1)], -2)
        missing = (point - x).sum(-1, keepdim=True) - fixed_part.sum(-1, keepdim=True)
        target = torch.cat([target, missing], -1)
    solution = torch.linalg.solve(system, target.unsqueeze(-1)).squeeze(-1)[..., :num_dims]
    return x + solution
