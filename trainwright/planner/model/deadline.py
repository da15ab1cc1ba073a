"""Until when to search: a count of work, a limit of the wall clock for a slow machine, or Ctrl-C.

Work is counted in seconds as a core takes them that nobody else uses, from what the solver and the simulation did and not from
a clock. So the same question ends at the same point however busy the machine is, unless it meets the wall clock's limit first.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

LEAST_S = 0.5
"""Each solve that is still asked for past the deadline may take this long, so that it returns something."""
_SLOWEST = 4.0
"""A slow or busy machine may take so many times as long as what is counted, where a solve must not be cut off by the clock."""


@dataclass(eq=False)
class _Question:
    """What all parts of one question's time share."""

    ends_at: float
    """The moment of the wall clock past which the incumbent is taken."""
    work_s: float = 0.0
    is_interrupted: bool = False


class Deadline:
    """So many seconds of counted work, and no more by the wall clock; Ctrl-C ends both.

    >>> deadline = Deadline(10)
    >>> deadline.count(4.0)
    >>> deadline.limited(60), deadline.part(3).limited(60), Deadline().limited(60), Deadline(0).limited(60)
    (6.0, 3.0, 60, 0.5)
    >>> late = Deadline(0)
    >>> late.has_passed, late.part(3).has_passed, late.afresh(3).has_passed, late.afresh(3).limited(60)
    (True, True, False, 3.0)
    >>> late.interrupt()
    >>> late.afresh(3).has_passed
    True
    """

    def __init__(self, seconds: float = math.inf, clock_s: float | None = None) -> None:
        """Begin a question of so many seconds of work; clock_s: as many by the wall clock, if not as many as of work."""
        self.seconds, self._began = seconds, time.perf_counter()
        self._question = _Question(self._began + (seconds if clock_s is None else clock_s))
        self._until_s, self._afresh_until = seconds, -math.inf

    @property
    def work_s(self) -> float:
        """Return the seconds of work that were counted since the question began."""
        return self._question.work_s

    def count(self, seconds: float) -> None:
        """Count work that was done."""
        self._question.work_s += seconds

    @property
    def left_s(self) -> float:
        """Return the seconds of work that this part has left."""
        return self._until_s - self.work_s

    def later(self, other: Deadline) -> Deadline:
        """Return the one of two parts of the same question that ends later."""
        return self if self._until_s >= other._until_s else other

    @property
    def is_used_up(self) -> bool:
        """True if all work of this part was done."""
        return self.left_s <= 0

    @property
    def is_over(self) -> bool:
        """True if the wall clock or Ctrl-C ends the whole question."""
        return time.perf_counter() >= self._ends_at

    @property
    def _ends_at(self) -> float:
        question = self._question
        return question.ends_at if question.is_interrupted else max(question.ends_at, self._afresh_until)

    @property
    def has_passed(self) -> bool:
        """True if the search takes the incumbent."""
        return self.is_used_up or self.is_over

    @property
    def is_interrupted(self) -> bool:
        """True after Ctrl-C."""
        return self._question.is_interrupted

    @property
    def spent_s(self) -> float:
        """Return the seconds by the wall clock since the search began."""
        return time.perf_counter() - self._began

    def limited(self, seconds: float) -> float:
        """Return `seconds` of work, or what is left where that is less, and at least `LEAST_S`."""
        left_s = 0.0 if self.is_over else self.left_s
        return max(LEAST_S, min(seconds, left_s))

    @property
    def wall_s(self) -> float:
        """Return the seconds that one more solve may take by the wall clock."""
        return max(LEAST_S, self._ends_at - time.perf_counter())

    def part(self, seconds: float) -> Deadline:
        """Return the deadline of a search that may take so many seconds of the work that is left."""
        found = Deadline.__new__(Deadline)
        found.seconds, found._began, found._question = self.seconds, self._began, self._question
        found._until_s, found._afresh_until = self.work_s + self.limited(seconds), self._afresh_until
        return found

    def beyond(self, seconds: float) -> Deadline:
        """Return the deadline of what may take so many seconds of the work that the question has left, if this part has less.

        >>> deadline = Deadline(10)
        >>> half = deadline.part(5)
        >>> deadline.count(4.0)
        >>> half.part(3).left_s, half.beyond(3).left_s, half.beyond(9).left_s
        (1.0, 3.0, 6.0)
        """
        found = self.part(0.0)
        found._until_s = max(found._until_s, min(self.work_s + seconds, self.seconds))
        return found

    def afresh(self, seconds: float) -> Deadline:
        """Return a deadline for a solve whose end must not hang on the solves before: with time of its own.

        The clock may have ended the question; it ends this only after `_SLOWEST` times as long, and Ctrl-C does at once.
        """
        found = self.part(0.0)
        found._until_s = self.work_s + seconds
        found._afresh_until = time.perf_counter() + _SLOWEST * seconds
        return found

    def extend(self, seconds: float) -> None:
        """Give the question at least so many seconds more from now on, unless Ctrl-C ended it."""
        if not self.is_interrupted:
            self._until_s = max(self._until_s, self.work_s + seconds)
            self._question.ends_at = max(self._question.ends_at, time.perf_counter() + seconds)

    def first_part(self) -> Deadline:
        """Return the deadline of one of several searches: half of the work that is left."""
        return self.part(max(0.0, self.left_s) / 2)

    def interrupt(self) -> None:
        """End the search now."""
        self._question.is_interrupted = True
        self._question.ends_at = min(self._question.ends_at, time.perf_counter())

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
