"""Counts a tier's transfers: bytes, transfers and busy seconds by direction, and their times."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

DIRECTIONS = ("read", "write")
MAX_EVENTS = 100_000
"""The number of last transfers that are kept for `Traffic.rates`."""


@dataclass
class Moved:
    """Totals of one direction; `num_bytes` counts whole pages, as the disk moves them."""

    num_bytes: int = 0
    num_transfers: int = 0
    busy_s: float = 0.0

    def since(self, before: Moved) -> Moved:
        """Return the difference to the earlier totals `before`."""
        return Moved(
            self.num_bytes - before.num_bytes, self.num_transfers - before.num_transfers, self.busy_s - before.busy_s
        )


class Traffic:
    """Counts transfers, from any thread.

    >>> traffic = Traffic()
    >>> traffic.add("read", 4096, begun=1.0, ended=1.5)
    >>> traffic.total("read"), traffic.rates("read", 0.0, 2.0, num=2)
    (Moved(num_bytes=4096, num_transfers=1, busy_s=0.5), [0.0, 4096.0])
    """

    def __init__(self) -> None:
        self._totals = {direction: Moved() for direction in DIRECTIONS}
        self._events: dict[str, deque[tuple[float, float, int]]] = {
            each: deque(maxlen=MAX_EVENTS) for each in DIRECTIONS
        }
        self._lock = threading.Lock()

    def add(self, direction: str, num_bytes: int, begun: float, ended: float) -> None:
        """Count one transfer; its times are on the clock `now`."""
        with self._lock:
            held = self._totals[direction]
            held.num_bytes += num_bytes
            held.num_transfers += 1
            held.busy_s += ended - begun
            self._events[direction].append((begun, ended, num_bytes))

    def total(self, direction: str) -> Moved:
        """Return a copy of the totals so far."""
        with self._lock:
            held = self._totals[direction]
            return Moved(held.num_bytes, held.num_transfers, held.busy_s)

    def rates(self, direction: str, begin: float, end: float, num: int = 40) -> list[float]:
        """Return the bytes a second in `num` equal intervals between two times, each transfer spread over its duration."""
        with self._lock:
            events = list(self._events[direction])
        width = max(end - begin, 1e-9) / num
        found = [0.0] * num
        for begun, ended, num_bytes in events:
            lasted = max(ended - begun, 1e-9)
            low, high = max(0, int((begun - begin) // width)), min(num - 1, int((ended - begin) // width))
            for place in range(low, high + 1):
                left = begin + place * width
                shared = min(ended, left + width) - max(begun, left)
                found[place] += num_bytes * max(shared, 0.0) / lasted / width
        return found


now = time.perf_counter
"""The clock of all events."""
