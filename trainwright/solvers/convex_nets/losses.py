"""Losses of a scalar output, summed over the examples."""

from __future__ import annotations

import torch
from torch import Tensor


def value(loss: str, output: Tensor, y: Tensor) -> Tensor:
    """Return ½‖output - y‖² (`squared`) or Σ log(1 + exp(-y · output)) (`logistic`, y = ±1).

    >>> value("squared", torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])).item()
    2.5
    """
    if loss == "squared":
        return (output - y).square().sum() / 2
    return torch.nn.functional.softplus(-y * output).sum()


def slope(loss: str, output: Tensor, y: Tensor) -> Tensor:
    """Return the loss's derivative at each output (n)."""
    return output - y if loss == "squared" else -y * torch.sigmoid(-y * output)


def curvature(loss: str, output: Tensor, y: Tensor) -> Tensor:
    """Return the loss's second derivative at each output (n)."""
    if loss == "squared":
        return torch.ones_like(output)
    chance = torch.sigmoid(output)
    return chance * (1 - chance)
