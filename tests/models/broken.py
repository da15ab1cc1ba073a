"""Models and batches that cannot be captured; each with a mistake that a user makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Branching(nn.Module):
    """Branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if h.sum() > 0:  # the data decides
            h = -h
        return h.mean()


class Selecting(Branching):
    """Picks elements by a mask: the result's shape depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h[x > 0].mean()  # as many as there happen to be


class Item(Branching):
    """Takes a number out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return (self.linear(x) / scale).mean()


class Opaque(Branching):
    """Returns an object that torch cannot look into."""

    def forward(self, x: Tensor) -> Any:
        return _Result(self.linear(x).mean())


class _Result:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class NoLoss(Branching):
    """Returns a dict without a loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.linear(x)}


class Wide(Branching):
    """Returns what is no scalar."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Failing(Branching):
    """Raises."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such head")


class Reentrant(Branching):
    """Checkpoints the old way."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=True).mean()


class Numpy(Branching):
    """Leaves torch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.from_numpy(x.detach().numpy() * 2)).mean()


def build(kind: str = "Branching") -> tuple[nn.Module, Any]:
    return globals()[kind](), (torch.ones(3, 4),)
