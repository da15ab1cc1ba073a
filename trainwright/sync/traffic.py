"""Counts the bytes that a worker sends in collectives and messages.

all_to_all    of one part for each member   (n − 1) parts
all_gather    of one part                   (n − 1) parts: on a ring each part is forwarded until all have it
broadcast     at its root                   (n − 1) times the tensor, whoever forwards it
send          at its sender                 the tensor
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Traffic:
    """Counts the calls and the bytes that one worker sent, by kind of call.

    >>> import torch
    >>> traffic = Traffic()
    >>> traffic.count("all_gather", torch.zeros(3, dtype=torch.float64), num_members=4)
    >>> traffic.sent_bytes, dict(traffic.calls)
    (72, {'all_gather': 1})
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes_by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def sent_bytes(self) -> int:
        """Return all bytes that this worker sent."""
        return sum(self.bytes_by_kind.values())

    def count(self, kind: str, tensor: Tensor, num_members: int = 2, is_root: bool = True) -> None:
        """Count one call with the tensor that torch.distributed gets."""
        self.calls[kind] += 1
        self.bytes_by_kind[kind] += sent_bytes(kind, tensor.numel() * tensor.element_size(), num_members, is_root)


def sent_bytes(kind: str, num_bytes: int, num_members: int, is_root: bool = True) -> int:
    """Return the bytes that one member sends in a call of `kind` with a tensor of `num_bytes`.

    >>> sent_bytes("all_to_all", 400, num_members=4)
    300
    """
    if kind == "all_to_all":
        return num_bytes * (num_members - 1) // num_members
    if kind == "all_gather":
        return num_bytes * (num_members - 1)
    if kind == "broadcast":
        return num_bytes * (num_members - 1) if is_root else 0
    assert kind == "send", kind
    return num_bytes


def all_reduce_bytes(num_elements: int, itemsize: int, num_workers: int) -> int:
    """Return the bytes that all workers together send for one all-reduce on a ring, with elements padded to n equal parts.

    >>> all_reduce_bytes(1000, 4, num_workers=4)  # each 2 · 3/4 of 4000
    24000
    """
    part = -(-num_elements // num_workers) * itemsize
    return 2 * num_workers * (num_workers - 1) * part
