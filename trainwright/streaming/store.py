"""Where blocks rest: a store has three methods, and `HostStore` keeps them in the host's memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..artifacts import UserError


class BlockStore(Protocol):
    """Named bytes that rest elsewhere. Reads and writes of other names may be under way at once, each in a thread."""

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into` (uint8, as many bytes as were written last); return when all are there."""

    def write(self, name: str, data: Tensor) -> None:
        """Keep the bytes of `data`; return when the tensor may be used for others."""

    def flush(self) -> None:
        """Return when all that was written would outlive this process, where the store promises that."""


class HostStore:
    """Blocks in the host's memory, page-locked where a GPU is in use.

    >>> store, into = HostStore(), torch.empty(3, dtype=torch.uint8)
    >>> store.write("h.0", torch.tensor([1, 2, 3], dtype=torch.uint8))
    >>> store.read("h.0", into)
    >>> into.tolist()
    [1, 2, 3]
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into` with the bytes of that name."""
        into.copy_(self._blocks[name])

    def write(self, name: str, data: Tensor) -> None:
        """Keep the bytes of `data`."""
        if name not in self._blocks:
            self._blocks[name] = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        self._blocks[name].copy_(data)

    def flush(self) -> None:
        """Return at once: memory outlives nothing."""


def check_fits(budget_bytes: int | None, predicted_bytes: int, largest: tuple[str, int]) -> None:
    """Raise `UserError` where a step does not fit into a budget of the device.

    predicted_bytes: the step's peak; largest: name and bytes of the largest block.
    """
    if budget_bytes is None:
        return
    name, num_bytes = largest
    from ..artifacts.sizes import format_bytes

    if 3 * num_bytes > budget_bytes:
        raise UserError(
            f"room for a block three times is needed: {format_bytes(3 * num_bytes)} for {name}; the budget is "
            f"{format_bytes(budget_bytes)}; raise it, store in bf16, or cut the model into smaller blocks"
        )
    if predicted_bytes > budget_bytes:
        raise UserError(
            f"{format_bytes(predicted_bytes)} are needed at the peak of a step; the budget is {format_bytes(budget_bytes)}; raise "
            "it, store in bf16, or take a smaller batch"
        )
