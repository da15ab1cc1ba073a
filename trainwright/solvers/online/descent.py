"""Accelerated projected gradient descent, the inner solver of projections in a metric and of the best fixed point."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def descend(
    gradient: Callable[[Tensor], Tensor],
    project: Callable[[Tensor], Tensor],
    start: Tensor,
    smoothness: Tensor | float,
    atol: float,
    max_iterations: int,
) -> Tensor:
    """Return the point where no step is longer than `atol`; a row of a batch restarts its momentum on its own."""
    x = ahead = start
    momentum = torch.ones_like(x[..., :1])
    for _ in range(max_iterations):
        new = project(ahead - gradient(ahead) / smoothness)
        following = (1 + torch.sqrt(1 + 4 * momentum**2)) / 2
        uphill = ((ahead - new) * (new - x)).sum(-1, keepdim=True) > 0
        weight = torch.where(uphill, 0.0, (momentum - 1) / following)
        done = float((new - ahead).norm(dim=-1).max()) <= atol
        momentum, ahead, x = torch.where(uphill, 1.0, following), new + weight * (new - x), new
        if done:
            break
    return x
