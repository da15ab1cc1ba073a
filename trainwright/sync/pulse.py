"""Detects workers that are gone: each one increments a counter in a shared store, and watches those of the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

_BEATS = 8
"""The heartbeats within the silence that means gone; a worker is silent after so many looks without a new one."""


class Pulse:
    """Writes heartbeats of worker `own` to `store` on a thread, and finds watched workers that were silent for `silence_s`.

    Silence is counted in consecutive looks without a new heartbeat, eight of them: a thread that was itself delayed has looked
    less often, and so takes nobody for silent. A process that is killed, stopped, or cut off falls silent; one that computes for
    long does not, since its thread continues.
    """

    def __init__(self, store: Any, own: int, silence_s: float) -> None:
        self._store, self._own, self.silence_s = store, own, silence_s
        self._seen: dict[int, tuple[bytes, int]] = {}
        """By worker: its last heartbeat, and the number of looks since that found no new one."""
        self._ended = threading.Event()
        self._count = 0
        self._tell()
        threading.Thread(target=self._go_on, name="pulse", daemon=True).start()

    def watch(self, workers: Sequence[int]) -> None:
        """Watch these workers from now on; each one's silence starts anew."""
        self._seen = {worker: (b"", 0) for worker in workers if worker != self._own}

    def silent(self) -> list[int]:
        """Return the watched workers that have been silent for too long, or that have left."""
        return [worker for worker, (count, missed) in list(self._seen.items()) if count == _LEFT or missed >= _BEATS]

    def end(self) -> None:
        """Announce that this worker leaves, so that nobody waits for it."""
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
        seen = self._seen  # `watch` may put another one in its place meanwhile
        for worker, (before, missed) in list(seen.items()):
            key = _key(worker)
            count = self._store.get(key) if self._store.check([key]) else b""
            seen[worker] = (count, 0 if count != before else missed + 1)


_LEFT = b"left"


def _key(worker: int) -> str:
    return f"pulse/{worker}"
