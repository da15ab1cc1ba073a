"""Until when to search: a limit of time, or Ctrl-C, after which what is best so far is taken."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEAST_S = 0.5
"""Each solve that is still asked for past the deadline may take this long, so that it returns something."""


class Deadline:
    """The moment in `seconds` from now, which Ctrl-C may bring forward.

    >>> Deadline(10).limited(60) <= 10, Deadline().limited(60), Deadline(0).limited(60)
    (True, 60, 0.5)
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds, self._began = seconds, time.perf_counter()
        self._at = self._began + seconds
        self.is_interrupted = False

    @property
    def has_passed(self) -> bool:
        """True if the deadline has passed, so that the search takes the incumbent."""
        return time.perf_counter() >= self._at

    @property
    def spent_s(self) -> float:
        """Return the seconds that have passed since the search began."""
        return time.perf_counter() - self._began

    def limited(self, seconds: float) -> float:
        """Return `seconds`, or what is left where that is less, and at least `LEAST_S`."""
        return max(LEAST_S, min(seconds, self._at - time.perf_counter()))

    def first_part(self) -> Deadline:
        """Return the deadline of one of several searches: half of what is left, and the same Ctrl-C."""
        return _Part(self, max(0.0, self._at - time.perf_counter()) / 2)

    def interrupt(self) -> None:
        """End the search now."""
        self.is_interrupted = True
        self._at = min(self._at, time.perf_counter())

    @contextmanager
    def at_ctrl_c(self) -> Iterator[None]:
        """Let Ctrl-C end the search inside, and a second one interrupt it; only where nobody else handles Ctrl-C."""
        is_ours = threading.current_thread() is threading.main_thread()
        if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.interrupt()

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _Part(Deadline):
    def __init__(self, whole: Deadline, seconds: float) -> None:
        self._whole = whole
        super().__init__(seconds)
        self.seconds, self._began = whole.seconds, whole._began  # people are told of the whole

    @property
    def has_passed(self) -> bool:
        return super().has_passed or self._whole.has_passed

    def limited(self, seconds: float) -> float:
        return self._whole.limited(super().limited(seconds))
