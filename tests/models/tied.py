"""Models of which several regions read one weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64


class _Layer(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.norm, self.shared, self.own = nn.LayerNorm(WIDTH), shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own(torch.tanh(self.shared(self.norm(x))))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(_Layer(shared) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def one_weight_in_all_layers() -> tuple[nn.Module, Any, Any]:
    """Four layers alike that share a weight and a bias, as those of ALBERT do."""
    torch.manual_seed(0)
    return _Layers(), (torch.randn(32, WIDTH),), lambda out, _: out
