"""Where blocks rest: in the host's memory or on disks.

`HostStore`   memory, page-locked where a GPU is in use
`DiskStore`   files of `trainwright.tiers`: moved directly, checksummed, striped over several folders
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..tiers import StoreOptions, TierStore


class BlockStore(Protocol):
    """Named bytes that rest elsewhere. Reads and writes of other names may be under way at once, each in a thread."""

    def reserve(self, num_bytes: Mapping[str, int]) -> None:
        """Make room for names that are new, or raise `UserError` before anything is written."""

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into` (uint8, as many bytes as were reserved); return when all are there."""

    def write(self, name: str, data: Tensor) -> None:
        """Keep the bytes of `data`; return when the tensor may be used for others."""

    def flush(self) -> None:
        """Return when all that was written would outlive this process, where the store promises that."""


class HostStore:
    """Blocks in the host's memory, page-locked where a GPU is in use.

    >>> store, into = HostStore(), torch.empty(3, dtype=torch.uint8)
    >>> store.reserve({"h.0": 3})
    >>> store.write("h.0", torch.tensor([1, 2, 3], dtype=torch.uint8))
    >>> store.read("h.0", into)
    >>> into.tolist()
    [1, 2, 3]
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def reserve(self, num_bytes: Mapping[str, int]) -> None:
        """Take the memory."""
        pinned = torch.cuda.is_initialized()
        for name, size in num_bytes.items():
            self._blocks[name] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into` with the bytes of that name."""
        into.copy_(self._blocks[name])

    def write(self, name: str, data: Tensor) -> None:
        """Keep the bytes of `data`."""
        self._blocks[name].copy_(data)

    def flush(self) -> None:
        """Return at once: memory outlives nothing."""


class DiskStore:
    """Blocks in files of one or several empty folders; `close` deletes them.

    Each block has two places, so that what was written before the last `flush` is whole until the next. Raises
    `UserError` for folders that are missing, not empty or too small, and `TierFault` where a disk fails.

    >>> import tempfile
    >>> into = torch.empty(3, dtype=torch.uint8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = DiskStore([folder])
    ...     store.reserve({"h.0": 3})
    ...     store.write("h.0", torch.tensor([1, 2, 3], dtype=torch.uint8))
    ...     store.read("h.0", into)
    ...     store.close()
    >>> into.tolist()
    [1, 2, 3]
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]], options: StoreOptions | None = None) -> None:
        self.tier = TierStore.create(folders, options)

    def reserve(self, num_bytes: Mapping[str, int]) -> None:
        """Make room on the disks."""
        self.tier.add(num_bytes)

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into` with the bytes of that name, whose checksums are right."""
        self.tier.read(name, into).wait()

    def write(self, name: str, data: Tensor) -> None:
        """Keep the bytes of `data`."""
        self.tier.write(name, data).wait()

    def flush(self) -> None:
        """Make what was written the last whole version."""
        self.tier.commit(self.tier.step + 1)

    def close(self) -> None:
        """Delete the files."""
        self.tier.remove()
