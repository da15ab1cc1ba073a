"""Ranks that live for the whole test session: starting some costs seconds, calling them milliseconds."""

from __future__ import annotations

from typing import Any

from trainwright.launch import Workers


class Pool:
    """Runs module-level functions on `num_ranks` ranks, the process group initialised, and returns one result a rank.

    Keywords and results are JSON. What a rank raises fails the test with that rank's traceback, and a hung call fails
    it after `timeout_s`; the ranks are then started anew for the next call.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._workers: Workers | None = None

    def run(self, function: str, timeout_s: float = 120, **keywords: Any) -> list[Any]:
        """Call `function` ("tests.module:name") with `keywords` on every rank."""
        __tracebackhide__ = True
        if self._workers is None or self._workers.closed:
            self._workers = Workers(self.num_ranks)
        return self._workers.call(function, keywords, timeout_s)

    @property
    def pids(self) -> list[int]:
        return [] if self._workers is None else self._workers.pids

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
