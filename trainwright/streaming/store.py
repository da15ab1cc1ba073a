"""Stores blocks in the host's memory or on disks.

`HostStore`   memory, page-locked if a GPU is in use
`DiskStore`   files of `trainwright.tiers`: direct I/O, checksums, striped over several folders
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..tiers import StoreOptions, TierStore


class BlockStore(Protocol):
    """Protocol of a store of named bytes; threads may read and write different names at the same time."""

    def reserve(self, num_bytes: Mapping[str, int]) -> None:
        """Allocate space for new names, or raise `UserError` before anything is written."""

    def read(self, name: str, into: Tensor) -> None:
        """Read the bytes of `name` into `into` (uint8, as many as were reserved), and wait for them."""

    def write(self, name: str, data: Tensor) -> None:
        """Store the bytes of `data`; return when the tensor may be reused."""

    def flush(self) -> None:
        """Wait until all written bytes would outlive this process, if the store supports that."""


class HostStore:
    """Stores blocks in the host's memory, page-locked if a GPU is in use.

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
        """Allocate memory for the names."""
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
        """Return at once, since memory does not outlive the process."""


class DiskStore:
    """Stores blocks in files of one or several empty folders; `close` deletes them.

    Each block has two slots, so that the versions of the last `flush` stay intact until the next one. Raises `UserError` for
    folders that are missing, not empty or too small, and `TierFault` if a disk fails.

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
        """Allocate space on the disks."""
        self.tier.add(num_bytes)

    def read(self, name: str, into: Tensor) -> None:
        """Read the bytes of `name` into `into`, and check their checksums."""
        self.tier.read(name, into).wait()

    def write(self, name: str, data: Tensor) -> None:
        """Keep the bytes of `data`."""
        self.tier.write(name, data).wait()

    def flush(self) -> None:
        """Commit all written versions."""
        self.tier.commit(self.tier.step + 1)

    def close(self) -> None:
        """Delete the files."""
        self.tier.remove()
