"""Tracks what this rank is doing and what its collectives have moved, for the watchdog and the progress line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Recorder(Protocol):
    """Records everything that a rank does, as the trace of some steps."""

    def did(self, what: str, is_collective: bool, start_ns: int) -> None: ...

    def issued(self, what: str, num_bytes: int, work: Any) -> None: ...


@dataclass(frozen=True)
class Doing:
    """One activity of a rank, with its start in monotonic seconds."""

    what: str
    since_s: float
    is_collective: bool = False
    peer: int | None = None
    """The rank that is waited for, if it is a single one."""


class Activity:
    """A rank's present doing, step and number of collectives; how long it was at them (seconds), what they moved (bytes).

    >>> activity = Activity()
    >>> activity.sends("all_reduce", num_bytes=8)
    >>> with activity.awaiting("all_reduce over axis a0"):
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
        self.recorder: Recorder | None = None

    @contextmanager
    def doing(self, what: str, is_collective: bool = False, peer: int | None = None) -> Iterator[None]:
        """Say what goes on inside the block."""
        before = self.now
        self.now = Doing(what, time.monotonic(), is_collective, peer)
        start_ns = time.time_ns()
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.did(what, is_collective, start_ns)
            self.now = Doing(before.what, time.monotonic(), before.is_collective, before.peer)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Say that inside the block all ranks meet for something that is no part of the step, and not counted."""
        return self.doing(what, is_collective=True)

    def sends(self, kind: str, num_bytes: int) -> None:
        """Count a collective that begins."""
        self.num_collectives += 1
        self.num_bytes[kind] += num_bytes

    def issued(self, what: str, num_bytes: int, work: Any) -> None:
        """Say that the backend has a collective, whose `work` tells when it is done."""
        if self.recorder is not None:
            self.recorder.issued(what, num_bytes, work)

    @contextmanager
    def awaiting(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Say that inside the block this rank waits for a collective, or for `peer` alone, and add up how long."""
        with self.exchanging(), self.doing(what, is_collective=True, peer=peer):
            yield

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count what the block takes among the seconds of collectives."""
        started = time.monotonic()
        yield
        self.comm_s += time.monotonic() - started
