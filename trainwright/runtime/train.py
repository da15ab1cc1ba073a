"""Training a planned model: the loop, its data, its metrics."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from ..capture.export import find_loss


def train_step(module: Any, optimizer: torch.optim.Optimizer, part: Any) -> Tensor:
    """Run one step of a `ParallelModule` on the rank's part of a batch and return the loss of the whole batch."""
    optimizer.zero_grad(set_to_none=True)
    output = module(**part) if isinstance(part, dict) else module(*part)
    loss = find_loss(output)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Timer:
    """Collects the seconds of `with` blocks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> Timer:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._started)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)
