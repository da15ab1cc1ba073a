"""Stores the tensors that a plan offloads: in a file of this rank's own, or in the host's memory.

    disk   one unnamed file a rank, which disappears with the process, however it ends; one thread reads and writes in order,
           through the page cache, or past it beside what rests on the same disks
    host   page-locked memory, written and read on streams beside the computing one; on a CPU, copies by threads

`rank.offload` bounds the bytes in flight: it waits for the oldest transfer before it issues more.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifacts import Plan, UserError
from ..rank.offload import OffloadStore
from ..tiers import Copies, Copy, MemoryStore, TierStore, copies_of
from ..tiers.buffers import memory_at, padded
from ..tiers.files import StripeFile


def open_store(plan: Plan, device: torch.device, beside: TierStore | MemoryStore | None = None) -> OffloadStore | None:
    """Return the store for the tensors that this rank offloads by `plan`; None if it offloads nothing.

    beside: the store of what rests on the same tier, whose rates are shared. The disk's file lies in its first folder then; else
    in `tempfile`'s default folder, which `TMPDIR` sets. Raises `UserError` if it cannot be written.
    """
    if plan.offload is None:
        return None
    if plan.offload.tier == "host":
        return HostStore(device, beside.copies if isinstance(beside, MemoryStore) else None)
    return DiskStore(beside.paths[0], beside) if isinstance(beside, TierStore) else DiskStore()


@dataclass(eq=False)
class _Extent:
    """An extent of the file; it becomes free when the object is deleted."""

    store: DiskStore
    offset: int
    num_bytes: int
    pending: Future[None] | None = None
    data: Tensor | None = None
    """The tensor that the pending transfer reads or fills. The thread gets its address only: if the thread had the last
    reference, it would free the memory at some later time, and the allocator's records would miss that."""

    def wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            error = pending.exception()
            self.data = None
            if error is not None:
                raise error

    def __del__(self) -> None:
        if self.pending is not None:
            self.pending.exception()
        self.store.free[self.num_bytes].append(self.offset)


class DiskStore:
    """Offloads to an unnamed file in `folder`; `OffloadStore` specifies the methods.

    One thread runs the transfers in the order of the calls, so a reused extent is never overwritten before it was read. A
    full or unwritable disk raises `UserError` in the step that meets it, before any weight changes.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, beside: TierStore | None = None) -> None:
        """`beside` is the store of what rests on the same disks: its transfers, buffers, rates and counts are shared.

        What a plan says of these disks' traffic counts activations, so they go past the page cache as all else does.
        """
        self._beside = beside
        self.folder = os.fspath(folder) if folder is not None else tempfile.gettempdir()
        try:
            self._file = StripeFile.unnamed(Path(self.folder), is_direct=beside is not None)
        except OSError as error:
            raise UserError(self._advice(0, error)) from None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainwright-offload")
        self._end = 0
        self.free: dict[int, list[int]] = defaultdict(list)
        """The offsets of the file's free extents, by size."""

    def write(self, data: Tensor) -> Any:
        num_bytes = data.numel() * data.element_size()
        free = self.free[num_bytes]
        extent = _Extent(self, free.pop() if free else self._extend(num_bytes), num_bytes)
        self._begin(extent, data, "write")
        return extent

    def written(self, ticket: _Extent) -> None:
        self._wait(ticket)

    def read(self, ticket: _Extent, into: Tensor) -> None:
        self._begin(ticket, into, "read")

    def arrived(self, ticket: _Extent) -> None:
        self._wait(ticket)

    def close(self) -> None:
        """Wait for the transfers in flight and delete the file."""
        self._worker.shutdown()
        self._file.close()

    def _begin(self, extent: _Extent, data: Tensor, direction: str) -> None:
        extent.data = data
        extent.pending = self._worker.submit(self._move, direction, extent.offset, data.data_ptr(), extent.num_bytes)

    def _extend(self, num_bytes: int) -> int:
        offset = self._end
        self._end += padded(num_bytes)
        return offset

    def _wait(self, ticket: _Extent) -> None:
        try:
            ticket.wait()
        except OSError as error:
            raise UserError(self._advice(ticket.num_bytes, error)) from None

    def _advice(self, num_bytes: int, error: OSError) -> str:
        return (
            f"room for what the plan offloads is needed in {self.folder}, {num_bytes} bytes more than the {self._size()} there; "
            f"the system says: {error.strerror}; free some, set TMPDIR to a folder on another disk, or plan with --offload none"
        )

    def _size(self) -> int:
        return os.fstat(self._file.fd).st_size if hasattr(self, "_file") else 0

    def _move(self, direction: str, offset: int, address: int, num_bytes: int) -> None:
        if self._beside is not None:
            self._beside.move(direction, self._file, offset, address, num_bytes)
            return
        data = memory_at(address, num_bytes)
        moved = self._file.write(data, offset) if direction == "write" else self._file.read(data, offset)
        if moved < num_bytes:
            raise OSError(errno.EIO, "the file ended early")


@dataclass(eq=False)
class _HostBuffer:
    """A buffer in the host's memory, with its last copy; it becomes free when the object is deleted."""

    store: HostStore
    buffer: Tensor
    copy: Copy

    def __del__(self) -> None:
        self.copy.wait()
        self.store.free[self.buffer.numel()].append((self.buffer, self.copy))


class HostStore:
    """Offloads to the host's memory; `OffloadStore` specifies the methods.

    On a GPU the buffers are page-locked, and transfers run on two streams, one for each direction. The computing stream waits for
    them, not the process: freed memory is reused by later work of that stream, which then runs after the transfer. On a CPU
    threads copy, and torch's allocator does not count the buffers.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        """`copies` are those of a tier in the host's memory, whose rates are shared; None: its own."""
        self.copies = copies or copies_of(device)
        self.free: dict[int, list[tuple[Tensor, Copy]]] = defaultdict(list)
        """The free buffers by size, with the copy to wait for before one is filled again."""
        self._leaving: list[Copy] = []

    def write(self, data: Tensor) -> Any:
        num_bytes = data.numel() * data.element_size()
        free = self.free[num_bytes]
        buffer, *last = free.pop() if free else (self.copies.buffer(num_bytes),)
        copy = self.copies.copy("write", buffer, data, last)
        self._leaving = [each for each in self._leaving if not each.is_done] + [copy]
        return _HostBuffer(self, buffer, copy)

    def written(self, ticket: _HostBuffer) -> None:
        ticket.copy.wait()

    def read(self, ticket: _HostBuffer, into: Tensor) -> None:
        # What comes may take the place of what is leaving.
        ticket.copy = self.copies.copy("read", into, ticket.buffer, [ticket.copy, *self._leaving])

    def arrived(self, ticket: _HostBuffer) -> None:
        ticket.copy.wait()
