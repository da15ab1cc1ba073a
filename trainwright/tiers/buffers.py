"""Provides page-aligned host memory for transfers, from a pool of fixed size that bounds the bytes in flight."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..artifacts import check_range

ALIGNMENT = 4096
"""The alignment of addresses, offsets and lengths in direct I/O: the largest that disks require."""


def padded(num_bytes: int) -> int:
    """Return the least multiple of `ALIGNMENT` that holds `num_bytes`.

    >>> padded(0), padded(1), padded(4096)
    (0, 4096, 4096)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(num_bytes: int) -> Tensor:
    """Return an uninitialised tensor of bytes in page-aligned memory of its own.

    A transfer from or to it needs no copy.

    >>> aligned_empty(100).shape, aligned_empty(100).data_ptr() % ALIGNMENT
    (torch.Size([100]), 0)
    """
    return torch.frombuffer(_pages(max(padded(num_bytes), ALIGNMENT)), dtype=torch.uint8)[:num_bytes]


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Return a view of memory that the caller keeps alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _pages(num_bytes: int) -> mmap.mmap:
    """Map private memory, which counts against the limit of the process's data segment like that of other tensors."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


class BufferPool:
    """A pool of aligned buffers of `chunk_bytes`; a thread that needs one waits until one is free.

    >>> pool = BufferPool(total_bytes=16384, chunk_bytes=8192)
    >>> with pool.buffer() as one, pool.buffer() as two:
    ...     len(one), pool.num_free
    (8192, 0)
    """

    def __init__(self, total_bytes: int, chunk_bytes: int) -> None:
        check_range(
            "a tier's buffer",
            chunk_bytes=(chunk_bytes, f"a multiple of {ALIGNMENT} bytes", lambda n: n > 0 and n % ALIGNMENT == 0),
            buffer_bytes=(total_bytes, f"at least a chunk, {chunk_bytes} bytes", lambda n: n >= chunk_bytes),
        )
        self.chunk_bytes, self.num = chunk_bytes, total_bytes // chunk_bytes
        self._free: list[memoryview] = []
        self._made = 0
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Return the number of buffers that can be taken without waiting."""
        return self.num - self._made + len(self._free)

    @contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Take a buffer from the pool for the `with` block."""
        with self._changed:
            while not self._free and self._made == self.num:
                self._changed.wait()
            if self._free:
                held = self._free.pop()
            else:
                held, self._made = memoryview(_pages(self.chunk_bytes)), self._made + 1
        try:
            yield held
        finally:
            with self._changed:
                self._free.append(held)
                self._changed.notify()
