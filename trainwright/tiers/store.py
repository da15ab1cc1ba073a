"""Stores named bytes in files of several folders, with direct I/O, checksums, two versions and bounded buffers.

    write(key)   writes to the slot without the committed version, chunk after chunk, on the write threads
    read(key)    reads the last version, after its write has ended, on the read threads, which no write blocks
    commit(step) waits until all writes are on the disk, then replaces one small file: that step is now the committed one

`write` and `read` issue a transfer and return a handle to wait for it. The transfer is directly between the disk and the given
tensor if that is page-aligned (`aligned_empty`), else through a buffer of the pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..artifacts import UserError
from .buffers import ALIGNMENT, BufferPool, memory_at, padded
from .counting import Traffic, now
from .faults import Fault, Planted, happen_to_read, happen_to_write, raise_as_fault, raise_for
from .files import StripeFile
from .layout import Item, Layout, Piece
from .manifest import NAME, PREVIOUS, read_manifest, write_manifest
from .places import check_empty, check_folders, check_room
from .throttle import TokenBucket

CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class StoreOptions:
    """The options of a store's transfers.

    chunk_bytes: the size of a transfer, a multiple of 4096. buffer_bytes: the most host memory for all buffers together.
    num_threads: concurrent transfers in each direction. read_rate, write_rate: limits in bytes a second; `None`: no limit.
    max_transfer_s: a chunk that takes longer raises the fault `slow`. faults: faults to inject.
    """

    chunk_bytes: int = CHUNK_BYTES
    buffer_bytes: int = 16 * CHUNK_BYTES
    num_threads: int = 2
    read_rate: float | None = None
    write_rate: float | None = None
    max_transfer_s: float = 60.0
    faults: Sequence[Fault] = ()


@dataclass(eq=False)
class Transfer:
    """A transfer in flight; it keeps its tensor alive."""

    parts: list[Future[None]]
    tensor: Tensor | None = field(repr=False, default=None)

    def wait(self) -> None:
        """Wait until the transfer is complete; raise its `TierFault`, if it failed."""
        errors = [error for part in self.parts if (error := part.exception()) is not None]
        self.tensor = None
        if errors:
            raise errors[0]  # and stays: whoever waits again learns of it too
        self.parts = []  # now that all are complete: other threads may be waiting for them

    def finish(self) -> None:
        """Wait until the transfer is complete; as `wait`, where no stream of a device could wait instead."""
        self.wait()

    @property
    def is_done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return all(part.done() for part in self.parts)


class TierStore:
    """Stores named bytes on disks; make one with `create` or `open`, and close it.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder, TierStore.create([folder]) as store:
    ...     store.add({"weight": 12})
    ...     store.write("weight", torch.arange(3, dtype=torch.int32)).wait()
    ...     into = torch.empty(3, dtype=torch.int32)
    ...     store.read("weight", into).wait()
    ...     store.commit(step=1)
    >>> into
    tensor([0, 1, 2], dtype=torch.int32)

    Use it only for data that does not fit in memory, since every byte goes through the disk.
    """

    def __init__(self, paths: list[Path], ident: str, options: StoreOptions, is_new: bool) -> None:
        self.paths, self.ident, self.options = paths, ident, options
        self.step, self.notes = -1, {}  # type: ignore[var-annotated]
        self.traffic = Traffic()
        self.items: dict[str, Item] = {}
        self._layout = Layout(len(paths), options.chunk_bytes)
        self._pool = BufferPool(options.buffer_bytes, options.chunk_bytes)
        self._planted = Planted(options.faults)
        self._buckets = {"read": TokenBucket(options.read_rate), "write": TokenBucket(options.write_rate)}
        self._files: list[StripeFile] = []
        for index, path in enumerate(paths):
            self._files.append(StripeFile.open(path / f"stripe-{index}-of-{len(paths)}-{ident}.bin", is_new))
        self._threads = {
            direction: ThreadPoolExecutor(options.num_threads, thread_name_prefix=f"trainwright-tier-{direction}")
            for direction in ("read", "write")
        }
        self._writing: dict[str, Transfer] = {}
        self._reading: dict[str, list[Transfer]] = {}

    @classmethod
    def create(cls, folders: Sequence[str | os.PathLike[str]], options: StoreOptions | None = None) -> TierStore:
        """Return a new store in empty folders, striped over them."""
        options = options or StoreOptions()
        check_options(options)
        paths = check_folders(folders)
        check_empty(paths)
        return cls(paths, uuid.uuid4().hex[:12], options, is_new=True)

    @classmethod
    def open(
        cls, folders: Sequence[str | os.PathLike[str]], options: StoreOptions | None = None, step: int | None = None
    ) -> TierStore:
        """Return the store that an earlier run left in `folders`, given in the same order, at its last committed step.

        step: the step to open; it may be the one before the last, if nothing was written after the last one.
        """
        options = options or StoreOptions()
        check_options(options)
        paths = check_folders(folders)
        data = read_manifest(paths[0])
        if step is not None and data["step"] != step:
            data = read_manifest(paths[0], PREVIOUS)
            if data["step"] != step:
                raise UserError(
                    f"a tier with step {step} whole is needed in {paths[0]}; there is {data['step']}; begin anew"
                )
        if len(paths) != data["num_folders"]:
            raise UserError(
                f"the {data['num_folders']} folders that this tier was made with are needed; got {len(paths)}; name them all, "
                "in the same order"
            )
        for index, path in enumerate(paths):
            name = f"stripe-{index}-of-{len(paths)}-{data['ident']}.bin"
            if not (path / name).is_file():
                raise UserError(
                    f"the file {name} of this tier is needed in {path}; it is not there; name the folders in order"
                )
        options = StoreOptions(**{**vars(options), "chunk_bytes": int(data["chunk_bytes"])})
        store = cls(paths, data["ident"], options, is_new=False)
        store.step, store.notes = int(data["step"]), data["notes"]
        for key, held in data["items"].items():
            store.items[key] = Item.from_json(key, held)
            store._layout.adopt(store.items[key])
        return store

    @staticmethod
    def last_step(folders: Sequence[str | os.PathLike[str]]) -> int:
        """Return the last committed step in `folders`."""
        return int(read_manifest(check_folders(folders)[0])["step"])

    def __enter__(self) -> TierStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_direct(self) -> bool:
        """Tell whether all transfers bypass the system's page cache."""
        return all(file.is_direct for file in self._files)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the files take on the disks, both slots included."""
        return sum(self._layout.ends)

    def __contains__(self, key: str) -> bool:
        return key in self.items

    def add(self, sizes: Mapping[str, int]) -> None:
        """Allocate items of the given sizes; raise `UserError`, before anything is allocated, if the disks lack space."""
        if doubled := sorted(self.items.keys() & sizes.keys()):
            raise UserError(f"new names are needed in a tier; {doubled[0]} is there; write it")
        before = list(self._layout.ends)
        added = {key: self._layout.add(key, num_bytes) for key, num_bytes in sizes.items()}
        try:
            check_room(self.paths, [end - begin for begin, end in zip(before, self._layout.ends, strict=True)])
            for path, file, end in zip(self.paths, self._files, self._layout.ends, strict=True):
                try:
                    file.reserve(end)
                except OSError as error:
                    raise_as_fault(error, os.fspath(path), f"to hold {end} bytes")
        except UserError:
            self._layout.ends = before
            raise
        self.items.update(added)

    def write(self, key: str, data: Tensor) -> Transfer:
        """Issue the write of `data`, which must be contiguous and stay unchanged until its end, as the new version of `key`."""
        item = self._of(key, data)
        slot = item.next_slot()
        pieces = list(item.pieces(slot, self._layout.chunk_bytes))
        after = [self._writing.get(key), *self._reading.pop(key, [])]
        item.slot, item.sums[slot] = slot, (sums := [0] * len(pieces))
        begun = [self._threads["write"].submit(self._write, sums, piece, data.data_ptr(), after) for piece in pieces]
        self._writing[key] = transfer = Transfer(begun, data)
        return transfer

    def read(self, key: str, into: Tensor) -> Transfer:
        """Issue the read of the last version of `key` into the contiguous tensor `into`."""
        item = self._of(key, into)
        if item.slot < 0:
            raise UserError(f"bytes that were written are needed; nothing of {key} was; write it first")
        pieces, sums, after = (
            item.pieces(item.slot, self._layout.chunk_bytes),
            item.sums[item.slot],
            self._writing.get(key),
        )
        begun = [self._threads["read"].submit(self._read, key, sums, piece, into.data_ptr(), after) for piece in pieces]
        transfer = Transfer(begun, into)
        self._reading[key] = [each for each in self._reading.get(key, []) if not each.is_done] + [transfer]
        return transfer

    def move(self, direction: str, file: StripeFile, offset: int, address: int, num_bytes: int) -> None:
        """Move memory at an address to pages of a file (write), or back (read), on the calling thread.

        The file is the store's or one of others on the same disks: its bytes go in whole pages, past the page cache where the file
        does, under the same rates and in the same counts.
        """
        chunk = self._pool.chunk_bytes
        for begin in range(0, num_bytes, chunk):
            self._move_chunk(direction, file, offset + begin, address + begin, min(chunk, num_bytes - begin))

    def _move_chunk(self, direction: str, file: StripeFile, offset: int, address: int, num_bytes: int) -> None:
        data = memory_at(address, num_bytes)
        if _is_direct(address, num_bytes):
            self._move_pages(direction, file, offset, data)
            return
        with self._pool.buffer() as buffer:
            whole = buffer[: padded(num_bytes)]
            if direction == "write":
                _copy(whole, data, num_bytes)
            self._move_pages(direction, file, offset, whole)
            if direction == "read":
                _copy(data, whole, num_bytes)

    def settle(self) -> None:
        """Wait for every write; raise the fault of one that failed."""
        for transfer in list(self._writing.values()):
            transfer.wait()
        self._writing.clear()

    def roll_back(self) -> None:
        """Discard all versions written after the last commit, so that `read` finds the committed ones."""
        self.settle()
        for item in self.items.values():
            item.slot = item.committed

    def commit(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Commit the last version of every item as step `step`, atomically: after a crash, all of it or nothing is found.

        notes: JSON values, which `store.notes` has after `open`.
        """
        self.settle()
        told = json.loads(json.dumps(dict(notes or {})))
        for path, file in zip(self.paths, self._files, strict=True):
            try:
                file.sync()
                if not file.path.exists():
                    raise_for("gone", os.fspath(path), f"to keep step {step}", f"{file.path.name} is not there")
            except OSError as error:
                raise_as_fault(error, os.fspath(path), f"to keep step {step}")
        data = {
            "step": step, "ident": self.ident, "num_folders": len(self.paths), "chunk_bytes": self._layout.chunk_bytes,
            "notes": told, "items": {key: item.as_json() for key, item in self.items.items()},
        }  # fmt: skip
        try:
            write_manifest(self.paths[0], data)
        except OSError as error:
            raise_as_fault(error, os.fspath(self.paths[0]), f"to keep step {step}")
        for item in self.items.values():
            item.committed = item.slot
        self.step, self.notes = step, told

    def close(self) -> None:
        """Wait for running transfers, and close the files; versions that were not committed are lost."""
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Close the store and delete its files; the folders stay."""
        self.close()
        for path in (*(file.path for file in self._files), self.paths[0] / NAME, self.paths[0] / PREVIOUS):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    # One chunk, on a thread

    def _write(self, sums: list[int], piece: Piece, address: int, after: Iterable[Transfer | None]) -> None:
        for earlier in after:
            for part in tuple(earlier.parts) if earlier is not None else ():
                part.exception()  # its fault is told to those who wait for it
        sums[piece.number] = zlib.crc32(memory_at(address + piece.begin, piece.num_bytes))
        self.move("write", self._files[piece.folder], piece.offset, address + piece.begin, piece.num_bytes)

    def _read(self, key: str, sums: list[int], piece: Piece, address: int, after: Transfer | None) -> None:
        for part in tuple(after.parts) if after is not None else ():
            part.result()  # what was not written is not read: the write's fault is the read's
        self.move("read", self._files[piece.folder], piece.offset, address + piece.begin, piece.num_bytes)
        if zlib.crc32(memory_at(address + piece.begin, piece.num_bytes)) != sums[piece.number]:
            raise_for("checksum", os.fspath(self.paths[piece.folder]), f"to read chunk {piece.number} of {key}")

    def _move_pages(self, direction: str, file: StripeFile, offset: int, data: memoryview) -> None:
        """Run one transfer of whole pages, at the limited rate, with an injected fault, if any."""
        folder, doing = os.fspath(file.folder), f"to {direction} {len(data)} bytes at {offset}"
        fault, begun = self._planted.next(direction), now()
        moved = 0
        try:
            if direction == "write":
                if fault is not None:
                    happen_to_write(fault, file.fd, data, offset)
                moved = file.write(data, offset)
            else:
                moved = file.read(data, offset)
                if fault is not None:
                    moved = happen_to_read(fault, data, moved)
        except OSError as error:
            raise_as_fault(error, folder, doing)
        if moved < len(data):
            raise_for("short read" if direction == "read" else "full", folder, doing, f"{moved} bytes were moved")
        if now() - begun > self.options.max_transfer_s:
            raise_for(
                "slow", folder, doing, f"it took {now() - begun:.1f} s; {self.options.max_transfer_s:g} are allowed"
            )
        self._buckets[direction].take(len(data))
        self.traffic.add(direction, len(data), begun, now())

    def _of(self, key: str, tensor: Tensor) -> Item:
        if key not in self.items:
            raise UserError(f"the name of an item is needed; {key} is none; add it first")
        item, num_bytes = self.items[key], tensor.numel() * tensor.element_size()
        if num_bytes != item.num_bytes or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise UserError(
                f"a contiguous tensor of {item.num_bytes} bytes on the CPU is needed for {key}; got {num_bytes} bytes, strides "
                f"{tuple(tensor.stride())}, on {tensor.device}; give another"
            )
        return item


def check_options(options: StoreOptions) -> None:
    """Raise `UserError` for impossible options, before any file is made."""
    BufferPool(options.buffer_bytes, options.chunk_bytes)
    for rate in (options.read_rate, options.write_rate):
        TokenBucket(rate)
    if options.num_threads < 1:
        raise UserError(f"at least one thread is needed for a tier; got {options.num_threads}; try 2")


def _is_direct(address: int, num_bytes: int) -> bool:
    return address % ALIGNMENT == 0 and num_bytes % ALIGNMENT == 0


def _copy(into: memoryview, source: memoryview, num_bytes: int) -> None:
    """Copy bytes without holding the GIL."""
    ctypes.memmove(_address(into), _address(source), num_bytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
