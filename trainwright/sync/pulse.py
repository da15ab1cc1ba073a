"""Signs of life: each worker counts in a shared store, and looks whether the others still do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

_BEATS = 8
"""Signs of life within the time after which a worker counts as gone."""


class Pulse:
    """Tells `store` that worker `own` lives, from a thread, and which of those it watches have been silent for `silence_s`.

    Only changes are looked at, by the own clock, so that clocks of machines may differ. A process that is killed, stopped, or
    cut off falls silent; one that computes for long does not, for the thread goes on.
    """

    def __init__(self, store: Any, own: int, silence_s: float) -> None:
        self._store, self._own, self.silence_s = store, own, silence_s
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._watched: tuple[int, ...] = ()
        self._ended = threading.Event()
        self._count = 0
        self._tell()
        threading.Thread(target=self._go_on, name="pulse", daemon=True).start()

    def watch(self, workers: Sequence[int]) -> None:
        """Look after these workers from now on; each has the whole time to show itself."""
        now_s = time.monotonic()
        self._seen = {worker: (b"", now_s) for worker in workers if worker != self._own}
        self._watched = tuple(self._seen)

    def silent(self) -> list[int]:
        """Return the watched workers of whom nothing new has been seen for too long, or that have left."""
        now_s = time.monotonic()
        return [
            worker
            for worker, (count, since_s) in list(self._seen.items())
            if count == _LEFT or now_s - since_s > self.silence_s
        ]

    def end(self) -> None:
        """Say that this worker leaves, so that nobody waits for it."""
        self._ended.set()

    def _go_on(self) -> None:
        while not self._ended.wait(self.silence_s / _BEATS):
            self._tell()
            self._look()
        self._store.set(_key(self._own), _LEFT)

    def _tell(self) -> None:
        self._count += 1
        self._store.set(_key(self._own), str(self._count))

    def _look(self) -> None:
        began_s = time.monotonic()
        for worker in self._watched:
            seen = self._seen.get(worker)
            key = _key(worker)
            count = self._store.get(key) if self._store.check([key]) else b""
            if seen is not None and count != seen[0]:
                self._seen[worker] = (count, time.monotonic())
        held_up_s = time.monotonic() - began_s
        if held_up_s > self.silence_s / 2:  # it is this one that was late: the others had no chance to be seen
            self._seen = {worker: (count, since_s + held_up_s) for worker, (count, since_s) in self._seen.items()}


_LEFT = b"left"


def _key(worker: int) -> str:
    return f"pulse/{worker}"
