"""Predicts the seconds of a streamed step from its parts' bytes and computation, in the order of `resting`.

    read    a block into the buffer that is not in use, once the one before is there and that buffer is written
    update  of a block that is there, beside the next one's read; its write begins then, after the write before it
    use     two forwards, beside the next block's read and this one's write

    step ≥ max(compute, Σ bytes / rate in, Σ bytes / rate out)

Two buffers couple the directions: a block is read where the last but one was, when that is written and no longer used. So a step
whose computation takes as long as its transfers takes longer than either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUM_STEPS = 3
"""The steps that are followed; the last one begins with buffers as every later one does."""


@dataclass(frozen=True)
class PartCost:
    """The seconds of a part of the model in a step: of the update that it catches up on, and of both forwards through it.

    num_bytes: those of a block that streams; 0 of a part that stays.
    """

    num_bytes: int
    update_s: float
    use_s: float


@dataclass(eq=False)
class _Buffer:
    part: int | None = None
    filled: float = 0.0
    """When its block is there."""
    written: float = 0.0
    """When its last write ends."""


def step_s(parts: Sequence[PartCost], beside_s: float, read_rate: float, write_rate: float) -> float:
    """Return the seconds of a step through `parts`, in order, with `beside_s` of computation outside of them.

    Rates are in bytes a second.

    >>> parts = [PartCost(num_bytes=100, update_s=0.0, use_s=1.0)] * 4
    >>> step_s(parts, 0.0, 1e9, 1e9), step_s(parts, 0.0, 50.0, 50.0)
    (4.0, 8.0)
    >>> step_s([PartCost(100, 0.5, 2.0)] * 4, 0.0, 50.0, 50.0)  # neither 8 s of transfers nor 10 s of computation
    10.0
    """
    run = _Run(parts, read_rate, write_rate)
    begun = 0.0
    for _ in range(NUM_STEPS):
        begun = run.now
        run.now += beside_s
        for index in range(len(parts)):
            run.enter(index)
    return run.now - begun


class _Run:
    def __init__(self, parts: Sequence[PartCost], read_rate: float, write_rate: float) -> None:
        self.parts, self.read_rate, self.write_rate = parts, read_rate, write_rate
        self.streams = [index for index, part in enumerate(parts) if part.num_bytes]
        self.buffers = [_Buffer(), _Buffer()]
        self.used: _Buffer | None = None
        self.now = self.reading = self.writing = 0.0
        """The clock, and when the last transfers end that were issued."""

    def enter(self, index: int) -> None:
        part = self.parts[index]
        if part.num_bytes:
            self._fetch(index)
            self.used = next(buffer for buffer in self.buffers if buffer.part == index)
            self.now = max(self.now, self.used.filled)
            self._fetch(self.streams[(self.streams.index(index) + 1) % len(self.streams)])
            self.now = max(self.now, self.used.written) + part.update_s
            self.writing = self.used.written = max(self.now, self.writing) + part.num_bytes / self.write_rate
        else:
            if self.streams and index < self.streams[0]:
                self._fetch(self.streams[0])
            self.now += part.update_s
        self.now += part.use_s

    def _fetch(self, index: int) -> None:
        if any(buffer.part == index for buffer in self.buffers):
            return
        buffer = next(buffer for buffer in self.buffers if buffer is not self.used)
        begins = max(self.now, self.reading, buffer.written)
        self.reading = buffer.filled = begins + self.parts[index].num_bytes / self.read_rate
        buffer.part = index
