"""Simulates torch's CUDA caching allocator: the memory that it reserves for a sequence of allocations and releases.

The rules (documented in torch's notes on CUDA memory, and c10/cuda/CUDACachingAllocator.cpp):

    a request is rounded up to 512 bytes
    up to 1 MiB: from the small pool, whose segments are 2 MiB; a block is split if 512 bytes or more remain
    above:       from the large pool; segments of 20 MiB for requests under 10 MiB, else rounded up to 2 MiB;
                 a block is split if more than 1 MiB remains
    the smallest free block that is large enough is taken, at the lowest address of equals; else a segment is asked for
    with expandable segments, each pool is one segment that grows at its end, by 2 MiB or 20 MiB at a time
    each stream has pools of its own: what one has given back serves no request of another
    a released block joins its free neighbours in the segment; segments are kept, unless memory has run out
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
MIN_OWN_SEGMENT_BYTES = 10 * 2**20
ROUND_SEGMENT_BYTES = 2 * 2**20


@dataclass(eq=False, slots=True)
class _Block:
    """One block of a segment, free or in use, linked to the blocks before and after it in the segment."""

    address: tuple[int, int]
    """The number of the segment, and the offset in it."""
    num_bytes: int
    pool: tuple[Hashable, bool]
    """The stream of its pool, and whether that is the small pool."""
    before: _Block | None = None
    after: _Block | None = None

    @property
    def is_small(self) -> bool:
        return self.pool[1]


@dataclass(slots=True)
class _Pool:
    """Holds the free blocks of one pool, sorted by size, then by address."""

    keys: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        bisect.insort(self.keys, (block.num_bytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, (block.num_bytes, block.address))]
        del self.blocks[block.address]

    def best_fit(self, num_bytes: int) -> _Block | None:
        place = bisect.bisect_left(self.keys, (num_bytes, (-1, -1)))
        return self.blocks[self.keys[place][1]] if place < len(self.keys) else None


class CachingAllocator:
    """Simulates the allocator: counts the bytes in blocks that are in use, the bytes reserved from the device, and their peak.

    Call `allocate(key, num_bytes)` and `free(key)`; read `allocated_bytes`, `reserved_bytes` and `peak_reserved_bytes`.

    capacity_bytes: the device's memory; before more than that is reserved, segments without a block in use are released.
    A request that still does not fit is reserved all the same, so `peak_reserved_bytes` can exceed the capacity.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate("a", 100), allocator.allocate("b", 3 * 2**20)
    (512, 3145728)
    >>> allocator.free("b")
    >>> allocator.allocated_bytes, allocator.reserved_bytes // 2**20
    (512, 22)
    """

    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.capacity_bytes, self.is_expandable = capacity_bytes, expandable_segments
        self._ends: dict[tuple[Hashable, bool], _Block] = {}
        """The last block of each pool's segment, where segments grow."""
        self.allocated_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0
        self.reserved_by_stream: dict[Hashable, int] = defaultdict(int)
        """The bytes of segments that each stream, or private pool, has asked for and not given back."""
        self._pools: dict[tuple[Hashable, bool], _Pool] = defaultdict(_Pool)
        self._used: dict[Hashable, _Block] = {}
        self._segments = itertools.count()

    def allocate(self, key: Hashable, num_bytes: int, stream: Hashable = None) -> int:
        """Allocate a block for `key` and return its size; a request of zero bytes gets no block.

        The block is larger than the request where its remainder is too small to be split off. stream: the current stream
        at the time of the request.
        """
        if num_bytes <= 0:
            return 0
        wanted = _rounded(num_bytes, MIN_BLOCK_BYTES)
        at = (stream, wanted <= SMALL_BYTES)
        pool = self._pools[at]
        block = pool.best_fit(wanted)
        if block is None:
            block = self._new_segment(wanted, at)
        else:
            pool.remove(block)
        self._split(block, wanted)
        self._used[key] = block
        self.allocated_bytes += block.num_bytes
        return block.num_bytes

    def free(self, key: Hashable) -> None:
        """Return the block of `key` to its pool and merge it with free neighbours; do nothing for a key that has no block."""
        block = self._used.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.num_bytes
        pool = self._pools[block.pool]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.address in pool.blocks:
                pool.remove(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                block = _joined(first, second)
                if self._ends.get(block.pool) is second:
                    self._ends[block.pool] = block
        pool.add(block)

    def _new_segment(self, wanted: int, at: tuple[Hashable, bool]) -> _Block:
        if self.is_expandable:
            return self._grown(wanted, at)
        num_bytes = _segment_bytes(wanted)
        if self.capacity_bytes is not None and self.reserved_bytes + num_bytes > self.capacity_bytes:
            self._give_back()
        self._reserve(num_bytes, at)
        return _Block((next(self._segments), 0), num_bytes, at)

    def _reserve(self, num_bytes: int, at: tuple[Hashable, bool]) -> None:
        self.reserved_by_stream[at[0]] += num_bytes
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _grown(self, wanted: int, at: tuple[Hashable, bool]) -> _Block:
        """Return a free block at the end of the pool's expandable segment, which grows by the bytes that are missing."""
        is_small = at[1]
        end, pool = self._ends.get(at), self._pools[at]
        is_free = end is not None and end.address in pool.blocks
        missing = wanted - (end.num_bytes if end is not None and is_free else 0)
        added = _rounded(missing, SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES)
        self._reserve(added, at)
        if end is not None and is_free:
            pool.remove(end)
            end.num_bytes += added
            return end
        address = (next(self._segments), 0) if end is None else (end.address[0], end.address[1] + end.num_bytes)
        block = _Block(address, added, at, end)
        if end is not None:
            end.after = block
        self._ends[at] = block
        return block

    def _give_back(self) -> None:
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.num_bytes
                    self.reserved_by_stream[block.pool[0]] -= block.num_bytes

    def _split(self, block: _Block, wanted: int) -> None:
        rest = block.num_bytes - wanted
        if rest < MIN_BLOCK_BYTES if block.is_small else rest <= SMALL_BYTES:
            return
        segment, offset = block.address
        free = _Block((segment, offset + wanted), rest, block.pool, block, block.after)
        if free.after is not None:
            free.after.before = free
        block.num_bytes, block.after = wanted, free
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = free
        self._pools[block.pool].add(free)


def _joined(first: _Block, second: _Block) -> _Block:
    first.num_bytes += second.num_bytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


def block_bytes(num_bytes: int) -> int:
    """Return the bytes of the block that a request of `num_bytes` takes, where none larger is taken whole.

    >>> block_bytes(0), block_bytes(1), block_bytes(513)
    (0, 512, 1024)
    """
    return _rounded(num_bytes, MIN_BLOCK_BYTES)


def _segment_bytes(wanted: int) -> int:
    if wanted <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if wanted < MIN_OWN_SEGMENT_BYTES else _rounded(wanted, ROUND_SEGMENT_BYTES)


def _rounded(num_bytes: int, granule: int) -> int:
    return -(-num_bytes // granule) * granule
