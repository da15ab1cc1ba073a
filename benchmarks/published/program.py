"""`Program`: a published run written as something that can be profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Program:
    """Everything that decides what one step holds and takes."""

    model: nn.Module
    batch: Any
    hardware: str
    read: str
    """Facts read in the source's code, beyond the row, that the program rests on."""
    loss_fn: Any = None
    make_optimizer: MakeOptimizer | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of `profile`."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context that the script enters for the whole step."""
    attention: float = 1.0
    """The share of a fused attention's usual rate that the source's own kernel reaches."""


class CannotExpress(Exception):
    """The row's run cannot be said; the text says why."""


class NoUpdate(torch.optim.Optimizer):
    """A script that runs forward and backward alone: gradients are dropped, nothing is updated."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(list(params), {})

    def step(self, closure: Any = None) -> None:
        return None


def ids(batch: int, length: int) -> torch.Tensor:
    """Return token ids without values."""
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def images(batch: int, size: int, channels_last: bool = False) -> torch.Tensor:
    """Return images in fp32 without values."""
    found = torch.zeros(batch, 3, size, size, device="meta")
    return found.contiguous(memory_format=torch.channels_last) if channels_last else found
