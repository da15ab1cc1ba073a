"""Projection in the norm of a matrix onto a box or a simplex, by the faces that a primal active-set method passes.

face       min (z − x)'H(z − x) with z fixed where it touches its bound, and Σ z fixed for the simplex       `_on_face`
step       towards that point as far as the bounds let; who meets a bound first is fixed there               `_room`
release    at the face's own point, the bound that the slope H(z − x) pulls away from hardest                `_pulls`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Project = Callable[[Tensor], Tensor]


def project_in(metric: Tensor, x: Tensor, project: Project, bounds: tuple[Tensor, Tensor], keeps_sum: bool) -> Tensor:
    """Return argmin of (z − x)'H(z − x) over {low ≤ z ≤ high}, with the sum of any feasible point where `keeps_sum`.

    Every step lowers the distance on a face and there are finitely many, so the condition of H costs no steps.
    """
    low, high = bounds
    point = project(x)
    free = (point > low) & (point < high)
    # What rounding leaves of a slope that is zero.
    least = (
        16
        * torch.finfo(x.dtype).eps
        * metric.abs().sum(-1).amax(-1, keepdim=True)
        * (1 + x.abs().amax(-1, keepdim=True))
    )
    for _ in range(50 + 10 * x.shape[-1]):
        exact = _on_face(metric, x, point, free, keeps_sum)
        room = torch.where(free, _room(point, exact, low, high), 1.0)
        share = room.amin(-1, keepdim=True)
        meets = free & (room <= share) & (share < 1)
        moved = torch.where(meets, torch.where(exact < point, low, high), point + share * (exact - point))
        point = torch.where(free, moved, point)
        pulls = _pulls(metric, point - x, free, (point <= low, point >= high), keeps_sum)
        hardest = pulls.amax(-1, keepdim=True)
        is_released = (pulls >= hardest) & (hardest > least) & (share >= 1)
        if bool(((share >= 1) & (hardest <= least)).all()):
            break
        free = (free & ~meets) | is_released
    return project(point)


def _room(point: Tensor, exact: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The share of the way from `point` to `exact`, at most 1, on which each coordinate stays within its bounds."""
    bound = torch.where(exact < point, low, high)
    outside = (exact < low) | (exact > high)
    return torch.where(outside, (bound - point) / torch.where(outside, exact - point, 1.0), 1.0).clamp(0.0, 1.0)


def _pulls(metric: Tensor, apart: Tensor, free: Tensor, at: tuple[Tensor, Tensor], keeps_sum: bool) -> Tensor:
    """How hard the slope pulls each fixed coordinate back inside; below zero where it presses it to its bound."""
    slope = (metric @ apart.unsqueeze(-1)).squeeze(-1)
    if keeps_sum:  # on a face of the simplex all free coordinates have one slope
        slope = slope - torch.where(free, slope, 0.0).sum(-1, keepdim=True) / free.sum(-1, keepdim=True).clamp_min(1)
    pulls = torch.where(at[0], -slope, torch.where(at[1], slope, -torch.inf))
    return torch.where(free, -torch.inf, pulls)


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
