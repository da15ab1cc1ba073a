"""Sends messages to one worker in order, in the background."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Outbox:
    """A queue of sends that run in order on a daemon thread; the next call raises the error of one that failed.

    >>> sent = []
    >>> outbox = Outbox("worker 1")
    >>> for number in range(3):
    ...     outbox.put(lambda number=number: sent.append(number))
    >>> outbox.close()
    >>> sent
    [0, 1, 2]
    """

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._work, name=f"to {name}", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], Any]) -> None:
        """Queue a send after those before it."""
        self._raise()
        self._waiting.put(send)

    def close(self) -> None:
        """Wait until all messages are sent."""
        self._waiting.put(None)
        self._thread.join()
        self._raise()

    def _work(self) -> None:
        while (send := self._waiting.get()) is not None:
            try:
                send()
            except RuntimeError as error:
                self._failure = error
                return

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
