"""Stores named bytes in the host's memory: a tier without files, for devices that have memory of their own.

    write(key)   copies a tensor of the device to the buffer of `key`, after the reads of it that were issued before
    read(key)    copies the buffer to a tensor of the device, after the writes that were issued before
    value(key)   is the buffer itself, for what the host reads: checkpoints

There is one version of everything, in memory: what a process that ends leaves behind is its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from .copies import Copy, copies_of
from .store import StoreOptions, check_options


@dataclass(frozen=True, eq=False)
class HostItem:
    """A named array of bytes, and the buffer that holds it."""

    num_bytes: int
    buffer: Tensor


class MemoryStore:
    """Stores named bytes in the host's memory; of its options, chunks, threads and rates hold, on CPUs.

    >>> store, into = MemoryStore(), torch.empty(3)
    >>> store.add({"weight": 12})
    >>> store.write("weight", torch.tensor([1.0, 2.0, 3.0])).wait()
    >>> store.read("weight", into).wait()
    >>> into, store.num_bytes
    (tensor([1., 2., 3.]), 12)
    >>> store.close()

    Use it where the device's memory is not the host's, or is a budget within it; else it only copies.
    """

    paths: tuple[Path, ...] = ()
    """A tier of disks has folders here."""

    def __init__(self, device: torch.device | None = None, options: StoreOptions | None = None) -> None:
        options = options or StoreOptions()
        check_options(options)
        self.copies = copies_of(device or torch.device("cpu"), options)
        self.traffic = self.copies.traffic
        self.items: dict[str, HostItem] = {}
        self.step, self.notes = -1, dict[str, Any]()
        self._writing: dict[str, Copy] = {}
        self._reading: dict[str, list[Copy]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.items

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all items."""
        return sum(item.num_bytes for item in self.items.values())

    def add(self, sizes: Mapping[str, int]) -> None:
        """Allocate items of the given sizes; raise `UserError` for a name that is there, or where the host has no room."""
        if doubled := sorted(self.items.keys() & sizes.keys()):
            raise UserError(f"new names are needed in a tier; {doubled[0]} is there; write it")
        check_available(sum(sizes.values()))
        self.items.update({key: HostItem(size, self.copies.buffer(size)) for key, size in sizes.items()})

    def drop(self, keys: Iterable[str]) -> None:
        """Release the items of these names."""
        for key in keys:
            self._finish(key)
            self._writing.pop(key, None)
            self._reading.pop(key, None)
            del self.items[key]

    def write(self, key: str, data: Tensor) -> Copy:
        """Begin to copy `data`, which must be contiguous and stay unchanged until its end, to the host as `key`."""
        item = self._of(key, data)
        after = [*filter(None, [self._writing.get(key)]), *self._reading.pop(key, [])]
        self._writing[key] = copy = self.copies.copy("write", item.buffer, data, after)
        return copy

    def read(self, key: str, into: Tensor) -> Copy:
        """Begin to copy the bytes of `key` into the contiguous tensor `into`."""
        item = self._of(key, into)
        if key not in self._writing:
            raise UserError(f"bytes that were written are needed; nothing of {key} was; write it first")
        copy = self.copies.copy("read", into, item.buffer, [self._writing[key]])
        self._reading[key] = [each for each in self._reading.get(key, []) if not each.is_done] + [copy]
        return copy

    def value(self, key: str, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """Return the buffer of `key` as a tensor on the CPU, once nothing is on its way there.

        What is written into it is what the next read finds.
        """
        self._finish(key)
        found = self.items[key].buffer.view(dtype).view(tuple(shape))
        self._writing.setdefault(key, _Made())
        return found

    def settle(self) -> None:
        """Wait for every copy."""
        for key in self.items:
            self._finish(key)

    def commit(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Note that `step` is done; nothing of it outlives the process."""
        self.step, self.notes = step, dict(notes or {})

    def close(self) -> None:
        """Wait for running copies and release all memory."""
        self.copies.close()
        self.items.clear()

    def remove(self) -> None:
        """Release all memory; as `close`."""
        self.close()

    def _finish(self, key: str) -> None:
        for copy in (*filter(None, [self._writing.get(key)]), *self._reading.get(key, [])):
            copy.finish()

    def _of(self, key: str, tensor: Tensor) -> HostItem:
        if key not in self.items:
            raise UserError(f"the name of an item is needed; {key} is none; add it first")
        item, num_bytes = self.items[key], tensor.numel() * tensor.element_size()
        if num_bytes != item.num_bytes or not tensor.is_contiguous():
            raise UserError(
                f"a contiguous tensor of {item.num_bytes} bytes is needed for {key}; got {num_bytes} bytes, strides "
                f"{tuple(tensor.stride())}; give another"
            )
        return item


class _Made:
    """Stands for the copy of what the host has written itself: it is made."""

    parts = ()
    event: Any = None
    is_done = True

    def wait(self) -> None:
        """Return at once."""

    def finish(self) -> None:
        """Return at once."""


def available_bytes() -> int | None:
    """Return the bytes of memory that the system has for new uses; None where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None


def check_available(num_bytes: int) -> None:
    """Raise `UserError` unless the host has `num_bytes` of memory free."""
    free = available_bytes()
    if free is not None and num_bytes > free:
        raise UserError(
            f"{num_bytes} bytes are needed in the host's memory for what rests there; {free} are free; free some, let less rest "
            "there (a larger --memory), or use disks (--tier disk)"
        )
