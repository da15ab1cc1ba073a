"""What this rank is at, and what its collectives have moved: read by the watchdog's thread and by the progress line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Doing:
    """One thing that a rank does, since when (monotonic seconds)."""

    what: str
    since_s: float
    is_collective: bool = False


class Activity:
    """A rank's present doing, step and number of collectives; what they took (seconds) and moved (bytes).

    >>> activity = Activity()
    >>> with activity.collective("all_reduce", "a0", num_bytes=8):
    ...     activity.now.what
    'all_reduce over axis a0'
    >>> activity.num_bytes["all_reduce"], activity.num_collectives
    (8, 1)
    """

    def __init__(self) -> None:
        self.step = 0
        self.num_collectives = 0
        self.comm_s = 0.0
        self.update_s = 0.0
        """Seconds of optimizers' steps, without what they exchange."""
        self.num_bytes: Counter[str] = Counter()
        self.now = Doing("starting", time.monotonic())

    @contextmanager
    def doing(self, what: str, is_collective: bool = False) -> Iterator[None]:
        """Say what goes on inside the block."""
        before = self.now
        self.now = Doing(what, time.monotonic(), is_collective)
        try:
            yield
        finally:
            self.now = Doing(before.what, time.monotonic(), before.is_collective)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Say that inside the block all ranks meet for something that is no part of the step, and not counted."""
        return self.doing(what, is_collective=True)

    @contextmanager
    def collective(self, kind: str, axis: str, num_bytes: int) -> Iterator[None]:
        """Say that the ranks of `axis` exchange something inside the block, and count it."""
        started = time.monotonic()
        self.num_collectives += 1
        with self.doing(f"{kind} over axis {axis}", is_collective=True):
            yield
        self.comm_s += time.monotonic() - started
        self.num_bytes[kind] += num_bytes
