"""A model of your own for the command line: a function that returns it with a batch, and the loss if it needs one.

    trainwright profile examples/own_model.py:build --batch-size 64
    trainwright plan    examples/own_model.py:build --set width=512 --hardware cpu:2 -o plan.json
    trainwright train   examples/own_model.py:build --plan plan.json --steps 20

The options of the command line reach the function as its keywords.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build(batch_size: int = 16, width: int = 256, depth: int = 4, num_classes: int = 10):
    """Return a residual network on vectors, a batch, and its loss."""
    model = nn.Sequential(nn.Linear(32, width), *(Block(width) for _ in range(depth)), nn.Linear(width, num_classes))
    batch = (torch.randn(batch_size, 32),)
    return model, batch, loss_fn


def loss_fn(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """Classes are the signs of the inputs' first entries: something that can be learnt."""
    (inputs,) = batch
    return nn.functional.cross_entropy(output, (inputs[:, 0] > 0).long())


class Block(nn.Module):
    """x + W₂ gelu(W₁ norm(x))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
