"""Ranks that live for the whole test session: starting some costs seconds, calling them milliseconds."""

from __future__ import annotations

from typing import Any

from trainwright.artifacts.cache_directory import cache_directory
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
            self._workers.call("tests.pool:share_references", timeout_s=timeout_s)
        return self._workers.call(function, keywords, timeout_s)

    @property
    def pids(self) -> list[int]:
        return [] if self._workers is None else self._workers.pids

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


def share_references() -> None:
    """Let `verify` on this rank take its reference from the session's cache, where an earlier test has captured it.

    Every rank of every check captures the whole step twice, for training and for evaluation: four fifths of what a check of
    a small model takes. The entries are the references' own, so that a plan's capture is still held against another one.
    """
    from trainwright.runtime.verification import reference

    reference.capture = shared_capture


def shared_capture(model: Any, batch: Any, loss_fn: Any = None, *, training: bool = True, autocast: Any = None) -> Any:
    """Return what `capture` returns."""
    from trainwright.capture import cached
    from trainwright.capture.experts import know_gates
    from trainwright.capture.export import capture

    cache, key = cache_directory(), cached._key(model, batch, loss_fn, autocast)
    if cache is None or key is None:
        return capture(model, batch, loss_fn, training=training, autocast=autocast)
    know_gates(model)
    entry = f"{key}-{'training' if training else 'evaluation'}"
    found = cached._read(cache, entry)
    if found is None:
        found = capture(model, batch, loss_fn, training=training, autocast=autocast)
        cached._write(cache, entry, found)
    return found
