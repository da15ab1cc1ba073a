"""Where items lie in the files of a tier: in chunks dealt over the folders, twice, so that the last whole version stays.

chunk c of an item      in folder (first + c) mod n, where `first` turns from item to item
slots 0 and 1           one holds the committed version, the other takes what is written next
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .buffers import padded

NUM_SLOTS = 2


class Piece(NamedTuple):
    """A chunk of an item: its number, where it begins in the item, its bytes, the folder, and its offset in the file there."""

    number: int
    begin: int
    num_bytes: int
    folder: int
    offset: int


@dataclass
class Item:
    """One named run of bytes. `slot` holds its last version, `committed` that of the last whole step (-1: neither yet)."""

    key: str
    num_bytes: int
    first: int
    offsets: list[list[int]]
    """By slot and folder, where its chunks begin."""
    slot: int = -1
    committed: int = -1
    sums: list[list[int]] = field(default_factory=lambda: [[], []])
    """By slot, a checksum a chunk."""

    def pieces(self, slot: int, chunk_bytes: int) -> Iterator[Piece]:
        """Yield the chunks of a slot in order."""
        num = len(self.offsets[slot])
        for number, begin in enumerate(range(0, self.num_bytes, chunk_bytes)):
            folder = (self.first + number) % num
            offset = self.offsets[slot][folder] + number // num * chunk_bytes
            yield Piece(number, begin, min(chunk_bytes, self.num_bytes - begin), folder, offset)

    def next_slot(self) -> int:
        """Return the slot that the next version goes to: never that of the last whole step."""
        return 1 - self.committed if self.committed >= 0 else 0

    def as_json(self) -> dict[str, Any]:
        """Return the place of the last version, for the manifest."""
        return {
            "num_bytes": self.num_bytes, "first": self.first, "offsets": self.offsets, "slot": self.slot,
            "sums": self.sums[self.slot] if self.slot >= 0 else [],
        }  # fmt: skip

    @classmethod
    def from_json(cls, key: str, data: Mapping[str, Any]) -> Item:
        """Return the item that a manifest tells of."""
        slot = int(data["slot"])
        item = cls(
            key, int(data["num_bytes"]), int(data["first"]), [list(each) for each in data["offsets"]], slot, slot
        )
        if slot >= 0:
            item.sums[slot] = list(data["sums"])
        return item


class Layout:
    """Gives items their places, one after the other in every folder's file.

    >>> layout = Layout(2, 8192)
    >>> item = layout.add("m", 20000)
    >>> [(piece.folder, piece.offset, piece.num_bytes) for piece in item.pieces(1, 8192)]
    [(0, 12288, 8192), (1, 8192, 8192), (0, 20480, 3616)]
    >>> layout.ends
    [24576, 16384]
    """

    def __init__(self, num_folders: int, chunk_bytes: int) -> None:
        self.ends = [0] * num_folders
        self.chunk_bytes = chunk_bytes
        self._next = 0

    def add(self, key: str, num_bytes: int) -> Item:
        """Return a new item of `num_bytes`, with both its slots."""
        offsets, first, num = [], self._next % len(self.ends), -(-num_bytes // self.chunk_bytes)
        last = (first + num - 1) % len(self.ends)
        for _ in range(NUM_SLOTS):
            offsets.append(list(self.ends))
            for folder in range(len(self.ends)):
                num_here = (num - 1 - (folder - first) % len(self.ends)) // len(self.ends) + 1
                self.ends[folder] += num_here * self.chunk_bytes
            self.ends[last] -= self.chunk_bytes - padded(num_bytes - (num - 1) * self.chunk_bytes)
        self._next = first + num
        return Item(key, num_bytes, first, offsets)

    def adopt(self, item: Item) -> None:
        """Keep clear of an item that was placed before."""
        for slot in range(NUM_SLOTS):
            for piece in item.pieces(slot, self.chunk_bytes):
                self.ends[piece.folder] = max(self.ends[piece.folder], piece.offset + padded(piece.num_bytes))
