"""Collectives of the processes of one machine, through memory that all of them map.

Sent over a socket, a tensor goes through the kernel; here a rank copies what it gives into its own memory, and whoever waits
for it reads it there. The process group is asked for one small gather alone: it says where a rank's part lies, that it lies
there, and whether the rank is still alive. So a collective is begun early and finished by the one who waits for it.

The memory has no name in any file system (`memfd_create`, opened by way of the owner's `/proc` entry): nothing is left
behind by a process that is killed.
"""

from __future__ import annotations

import mmap
import os
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .flat import all_gather_flat

LEAST_BYTES = 64 * 2**10
"""Less is sent: the small gather alone takes as long."""
MOST_RANKS = 4
"""Of a sum each rank reads all of what every other gave, where a ring sends twice the tensor at most: measured up to four."""
LIMIT_BYTES = 32 * 2**20
"""What one rank may have under way through the memory of one group. More is sent, as all ranks know without asking."""
SWITCH = "TRAINWRIGHT_SHARED_MEMORY"
"""The environment variable that turns this off, at 0."""

Finish = Callable[[Tensor, Tensor], object]
"""What is left to do to the result, by what was given, once the ranks have met."""

_ROOM_BYTES = 2 * LIMIT_BYTES
"""Of what was read here, some may not have been read by the others."""
_MARKS = 4096
"""How many collectives may be unread at once."""
_ROOM_AT = 8 * _MARKS
_ALIGNED = 64
_NOWHERE = -1
"""Where a part lies that found no room: all ranks then send this one."""


def is_shared(kind: str, tensor: Tensor) -> bool:
    """Whether a collective may go through memory: by its kind and size alone, which are the same on every rank."""
    return kind != "all_to_all" and tensor.device.type == "cpu" and tensor.nbytes >= LEAST_BYTES


@dataclass(frozen=True)
class _Offer:
    """Where a process's memory can be opened, and by what one knows that it is the right one."""

    place: tuple[str, str, int]
    """The machine's boot, the namespace of process numbers, and the user."""
    path: str
    token: bytes


class _Block:
    """One rank's memory as mapped here: marks, by number, of the collectives that it has finished, and room for what it gives."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, _ROOM_AT + _ROOM_BYTES)
        self.marks = torch.frombuffer(memory, dtype=torch.int64, count=_MARKS)
        self.room = torch.frombuffer(memory, dtype=torch.uint8, offset=_ROOM_AT)

    def view(self, start: int, like: Tensor) -> Tensor:
        """Return so many bytes from `start` as `like` takes, as a tensor like it."""
        return self.room[start : start + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True)
class _Slot:
    """What one collective's part takes of this rank's room."""

    start: int
    stop: int
    number: int


class SharedMemory:
    """The memory of the ranks of one group, in the group's order; made by `shared_memory`, on all of them together."""

    def __init__(self, group: Any, own: int, blocks: Sequence[_Block]) -> None:
        self.group, self.own, self.blocks = group, own, list(blocks)
        self.num_bytes = 0
        """Begun here and not finished. All ranks begin and finish the same in the same order, so that it is alike on all; one
        that nobody waits for counts for good."""
        self._number = 0
        self._slots: list[_Slot] = []

    def takes(self, tensor: Tensor) -> bool:
        """Whether there is room for what `is_shared` lets through: the same answer on every rank."""
        return self.num_bytes + tensor.nbytes <= LIMIT_BYTES

    def begin(self, kind: str, tensor: Tensor, send: Finish) -> tuple[Any, Finish]:
        """Give this rank's part of a collective; return the work that ends when all have, and what finishes it then.

        send: carries the collective out by the process group, for one that finds no room on some rank.
        """
        num_bytes = tensor.nbytes
        self.num_bytes += num_bytes
        self._number += 1
        number, start = self._number, self._allocate(num_bytes)
        if start != _NOWHERE:
            self._give(kind, tensor, self.blocks[self.own].view(start, tensor))
        # not of torch's allocator, whose peak is promised to the byte
        said = torch.frombuffer(array("q", [number, num_bytes, start]), dtype=torch.int64)
        heard = torch.frombuffer(array("q", [0] * 3 * len(self.blocks)), dtype=torch.int64)
        work = all_gather_flat(heard, said, group=self.group, async_op=True)

        def finish(given: Tensor, result: Tensor) -> None:
            self.num_bytes -= num_bytes
            numbers, sizes, starts = zip(*heard.view(-1, 3).tolist())
            if len(set(zip(numbers, sizes))) > 1:
                raise RuntimeError(
                    f"all ranks are to begin the same collectives in the same order; {kind} of {num_bytes} bytes, number "
                    f"{number} here, met {sorted(set(zip(numbers, sizes)))}; a rank has left out a step, or taken another"
                )
            if _NOWHERE in starts:
                send(given, result)
            else:
                self._take(kind, given, result, starts)
            self.blocks[self.own].marks[number % _MARKS] = number

        return work, finish

    def _give(self, kind: str, tensor: Tensor, slot: Tensor) -> None:
        if kind != "reduce_scatter":
            slot.copy_(tensor)
            return
        for rank in range(len(self.blocks)):
            if rank != self.own:
                slot[rank].copy_(tensor[rank])

    def _take(self, kind: str, given: Tensor, result: Tensor, starts: Sequence[int]) -> None:
        """Read what the others gave. Sums are in the order of the ranks: the same on each of them, to the bit."""
        if kind == "all_gather":
            for rank, block in enumerate(self.blocks):
                result[rank].copy_(given if rank == self.own else block.view(starts[rank], given))
        elif kind == "reduce_scatter":
            _sum([
                given[rank] if rank == self.own else block.view(starts[rank], given)[self.own]
                for rank, block in enumerate(self.blocks)
            ], result)  # fmt: skip
        elif len(self.blocks) == 2:  # either order is the other's
            other = 1 - self.own
            result.add_(self.blocks[other].view(starts[other], given))
        else:
            _sum([block.view(start, given) for block, start in zip(self.blocks, starts)], result)

    def _allocate(self, num_bytes: int) -> int:
        """Return where there is room for so much; nowhere, if others have not yet read what lies there."""
        self._slots = [slot for slot in self._slots if not self._is_read(slot)]
        if len(self._slots) >= _MARKS:
            return _NOWHERE
        start = 0
        for place, slot in enumerate([*self._slots, _Slot(_ROOM_BYTES, _ROOM_BYTES, 0)]):
            if start + num_bytes <= slot.start:
                self._slots.insert(place, _Slot(start, start + num_bytes, self._number))
                return start
            start = -(-slot.stop // _ALIGNED) * _ALIGNED
        return _NOWHERE

    def _is_read(self, slot: _Slot) -> bool:
        """Whether all ranks, this one too, have finished what the slot was for: each marks it once it has read."""
        at = slot.number % _MARKS
        return all(int(block.marks[at]) >= slot.number for block in self.blocks)


def _sum(parts: Sequence[Tensor], result: Tensor) -> None:
    torch.add(parts[0], parts[1], out=result)
    for part in parts[2:]:
        result.add_(part)


def shared_memory(group: Any) -> SharedMemory | None:
    """Return the memory that the ranks of `group` share; None where they do not. All ranks of it have to call this.

    They do where they are two to four processes of one user on one Linux machine, and nobody has set `SWITCH` to 0.
    """
    size, own = dist.get_world_size(group), dist.get_rank(group)
    if not 1 < size <= MOST_RANKS:
        return None
    descriptor, offer = _offered() or (None, None)
    try:
        offers: list[_Offer | None] = [None] * size
        dist.all_gather_object(offers, offer, group=group)
        blocks = _opened(offers)
        # the others have opened this rank's when they have answered
        answers: list[bool | None] = [None] * size
        dist.all_gather_object(answers, blocks is not None, group=group)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return SharedMemory(group, own, blocks) if blocks is not None and all(answers) else None


def _offered() -> tuple[int, _Offer] | None:
    """Make this process's memory: its descriptor, and what the others need to open it; None where there can be none."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        place = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"), os.getuid()
        descriptor = os.memfd_create("trainwright")
    except OSError:
        return None
    token = secrets.token_bytes(16)
    try:
        os.ftruncate(descriptor, _ROOM_AT + _ROOM_BYTES)
        os.pwrite(descriptor, token, _ROOM_AT)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor, _Offer(place, f"/proc/{os.getpid()}/fd/{descriptor}", token)


def _opened(offers: Sequence[_Offer | None]) -> list[_Block] | None:
    """Map everybody's memory; None where one of them cannot be."""
    found = [offer for offer in offers if offer is not None]
    if len(found) < len(offers) or len({offer.place for offer in found}) > 1:
        return None
    blocks = []
    for offer in found:
        try:
            descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.pread(descriptor, len(offer.token), _ROOM_AT) != offer.token:
                return None
            blocks.append(_Block(descriptor))
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
    return blocks
