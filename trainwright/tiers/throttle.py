"""Limits the rate of transfers to given bytes a second by a token bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..artifacts import check_range


class TokenBucket:
    """Limits transfers to `rate` bytes a second, with bursts of `burst` bytes after a pause.

    Call `take(n)` after a transfer of n bytes: it waits for the rest of the time that they take at `rate`. Threads share the
    rate. With `rate=None` nothing waits.

    >>> waits = []
    >>> bucket = TokenBucket(100.0, burst=0, clock=lambda: 0.0, sleep=waits.append)
    >>> bucket.take(50), bucket.take(100), waits
    (None, None, [0.5, 1.5])
    """

    def __init__(
        self,
        rate: float | None,
        burst: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if rate is not None:
            check_range("a tier", rate=(rate, "more than 0 bytes a second", lambda value: value > 0))
        self.rate, self.burst = rate, burst
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more are within the rate."""
        if self.rate is None:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - self.burst / self.rate) + num_bytes / self.rate
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)
