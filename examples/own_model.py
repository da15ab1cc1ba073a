"""A model of your own for the command line: a function that returns it with a batch, its loss, and data to train on.

    trainwright profile examples/own_model.py:build --batch-size 64
    trainwright plan    examples/own_model.py:build --set width=512 --hardware cpu:2 -o plan.json
    trainwright train   examples/own_model.py:build --plan plan.json --steps 20
    trainwright verify  examples/own_model.py:build --plan plan.json

The model is called with what its `forward` takes of the batch, here x; the rest goes to the loss. The options of the
command line reach the function as its keywords.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def build(batch_size: int = 16, width: int = 256, depth: int = 4, num_classes: int = 10) -> dict[str, Any]:
    """Return a residual network on vectors, one batch (x, y), its loss, and the examples that `train` takes."""
    model = nn.Sequential(nn.Linear(32, width), *(Block(width) for _ in range(depth)), nn.Linear(width, num_classes))
    x = torch.randn(20 * batch_size, 32)
    y = x[:, :num_classes].argmax(dim=1)  # something that can be learnt
    return {
        "model": model,
        "batch": (x[:batch_size], y[:batch_size]),
        "loss_fn": nn.CrossEntropyLoss(),
        "dataset": TensorDataset(x, y),
    }


class Block(nn.Module):
    """x + W₂ gelu(W₁ norm(x))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
