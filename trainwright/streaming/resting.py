"""Moves blocks between store and device with two buffers: the next block is prefetched while one is in use or written.

read(i + 1) ─┐           one buffer is filled or written back while the other's block is in use;
use(i)       ├─ at once  a buffer's write ends before the buffer is filled again
write(i)    ─┘
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .store import BlockStore


@dataclass(eq=False)
class _Buffer:
    data: Tensor
    name: str | None = None
    reading: Future[None] | None = field(default=None, repr=False)
    writing: Future[None] | None = field(default=None, repr=False)


class Resting:
    """Gives access to the blocks of a store, of which two are in buffers at a time."""

    def __init__(self, store: BlockStore, num_bytes: dict[str, int], device: torch.device) -> None:
        self.store, self.num_bytes = store, num_bytes
        self._buffers = [
            _Buffer(torch.empty(max(num_bytes.values()), dtype=torch.uint8, device=device)) for _ in range(2)
        ]
        store.reserve(num_bytes)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="trainwright-block-in")
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="trainwright-block-out")
        self._used: _Buffer | None = None
        self.num_read = self.num_written = 0
        """The bytes read and written so far."""

    def fetch(self, name: str) -> None:
        """Issue the read of a block into the buffer that is not in use."""
        if any(each.name == name for each in self._buffers):
            return
        buffer = next(each for each in self._buffers if each is not self._used)
        if buffer.reading is not None:
            buffer.reading.result()  # another block was expected: its bytes are dropped
        buffer.name = name
        before, into = buffer.writing, buffer.data[: self.num_bytes[name]]
        buffer.writing = None

        def read() -> None:
            if before is not None:
                before.result()
            self.store.read(name, into)

        self.num_read += self.num_bytes[name]
        buffer.reading = self._readers.submit(read)

    def use(self, name: str) -> Tensor:
        """Return a block's bytes, which are valid until another block is used."""
        self.fetch(name)
        self._used = next(each for each in self._buffers if each.name == name)
        if self._used.reading is not None:
            reading, self._used.reading = self._used.reading, None
            try:
                reading.result()
            except BaseException:
                self._used.name = None
                self._used = None
                raise
        return self._used.data[: self.num_bytes[name]]

    def write(self) -> None:
        """Issue the write of the block in use after a change; its bytes must not change again before the next `use`."""
        buffer = self._used
        assert buffer is not None
        assert buffer.name is not None
        name, data, before = buffer.name, buffer.data[: self.num_bytes[buffer.name]], buffer.writing

        def write() -> None:
            if before is not None:
                before.result()
            self.store.write(name, data)

        self.num_written += self.num_bytes[name]
        buffer.writing = self._writers.submit(write)

    def settle(self) -> None:
        """Wait for all writes; raise the error of one that failed."""
        for buffer in self._buffers:
            if buffer.writing is not None:
                buffer.writing.result()

    def changing(self) -> None:
        """Wait for the write of the block in use, after which its bytes may be changed."""
        if self._used is not None and self._used.writing is not None:
            self._used.writing.result()

    @property
    def data(self) -> list[Tensor]:
        """Return the two buffers."""
        return [buffer.data for buffer in self._buffers]

    def spare(self) -> Tensor:
        """Return a buffer that is free before the first block is used."""
        return self._buffers[0].data

    def add(self, name: str, data: Tensor) -> None:
        """Add a block to the store, with its bytes."""
        if name not in self.num_bytes:
            self.num_bytes[name] = data.numel()
            self.store.reserve({name: data.numel()})
        self.store.write(name, data)

    def close(self) -> None:
        """Wait for the running transfers and stop the threads."""
        self._readers.shutdown()
        self._writers.shutdown()
