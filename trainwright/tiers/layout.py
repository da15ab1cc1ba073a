"""Places items in the files of a tier: in chunks striped over the folders, in two slots, so that the committed one stays.

chunk c of an item      in folder (first + c) mod n, where `first` rotates from item to item
slots 0 and 1           one holds the committed version, the other takes the next version
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .buffers import padded

NUM_SLOTS = 2


class Piece(NamedTuple):
    """A chunk of an item: its index, its start within the item, its bytes, its folder, and its offset in that folder's file."""

    number: int
    begin: int
    num_bytes: int
    folder: int
    offset: int


@dataclass
class Item:
    """A named array of bytes; `slot` holds its last version, `committed` the committed one (-1: none yet)."""

    key: str
    num_bytes: int
    first: int
    offsets: list[list[int]]
    """The offset of the first chunk, by slot and folder."""
    slot: int = -1
    committed: int = -1
    sums: list[list[int]] = field(default_factory=lambda: [[], []])
    """The checksum of each chunk, by slot."""

    def pieces(self, slot: int, chunk_bytes: int) -> Iterator[Piece]:
        """Yield the chunks of a slot in order."""
        num = len(self.offsets[slot])
        for number, begin in enumerate(range(0, self.num_bytes, chunk_bytes)):
            folder = (self.first + number) % num
            offset = self.offsets[slot][folder] + number // num * chunk_bytes
            yield Piece(number, begin, min(chunk_bytes, self.num_bytes - begin), folder, offset)

    def next_slot(self) -> int:
        """Return the slot for the next version: never that of the committed one."""
        return 1 - self.committed if self.committed >= 0 else 0

    def as_json(self) -> dict[str, Any]:
        """Return the manifest's entry for the last version."""
        return {
            "num_bytes": self.num_bytes, "first": self.first, "offsets": self.offsets, "slot": self.slot,
            "sums": self.sums[self.slot] if self.slot >= 0 else [],
        }  # fmt: skip

    @classmethod
    def from_json(cls, key: str, data: Mapping[str, Any]) -> Item:
        """Return the item of a manifest's entry."""
        slot = int(data["slot"])
        item = cls(
            key, int(data["num_bytes"]), int(data["first"]), [list(each) for each in data["offsets"]], slot, slot
        )
        if slot >= 0:
            item.sums[slot] = list(data["sums"])
        return item


class Layout:
    """Allocates space for items, one after the other in every folder's file.

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
        """Return a new item of `num_bytes`, with space for both its slots."""
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
        """Reserve the space of an item that was placed by an earlier run."""
        for slot in range(NUM_SLOTS):
            for piece in item.pieces(slot, self.chunk_bytes):
                self.ends[piece.folder] = max(self.ends[piece.folder], piece.offset + padded(piece.num_bytes))
