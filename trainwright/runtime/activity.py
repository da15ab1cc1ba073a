"""Tracks what this rank is doing and what its collectives have moved, for the watchdog and the progress line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Recorder(Protocol):
    """Protocol of an object that records a rank's activities and collectives, such as a trace of some steps."""

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
    """Holds a rank's current activity and step, and counts its collectives, their seconds and the bytes that they moved.

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
        """Seconds of the optimizers' steps, without their collectives."""
        self.num_bytes: Counter[str] = Counter()
        self.now = Doing("starting", time.monotonic())
        self.recorder: Recorder | None = None

    @contextmanager
    def doing(self, what: str, is_collective: bool = False, peer: int | None = None) -> Iterator[None]:
        """Set the rank's current activity to `what` inside the `with` block."""
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
        """Set the current activity to a collective outside of the step, which is not counted, inside the `with` block."""
        return self.doing(what, is_collective=True)

    def sends(self, kind: str, num_bytes: int) -> None:
        """Count a collective that is about to be issued."""
        self.num_collectives += 1
        self.num_bytes[kind] += num_bytes

    def issued(self, what: str, num_bytes: int, work: Any) -> None:
        """Tell the recorder of an issued collective, whose `work` knows when it is complete."""
        if self.recorder is not None:
            self.recorder.issued(what, num_bytes, work)

    @contextmanager
    def awaiting(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Set the current activity to waiting for a collective, or for `peer` alone, and add the block's time to `comm_s`."""
        with self.exchanging(), self.doing(what, is_collective=True, peer=peer):
            yield

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Add the time of the `with` block to the seconds of collectives, `comm_s`."""
        started = time.monotonic()
        yield
        self.comm_s += time.monotonic() - started
