"""Ranks that live for the whole test session: starting some costs seconds, calling them milliseconds."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.artifacts.cache_directory import cache_directory, cache_folder
from trainwright.launch import Workers

ROOT = f"{Path(__file__).parents[1]}/"


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


def leave_tests_out() -> None:
    """Let no capture hang on which modules of tests are loaded: their files stay as they are while a session lasts.

    Ranks load the module of each call, and else captured every model anew after that.
    """
    from trainwright.capture import surroundings

    of_user = surroundings._own_files
    surroundings._own_files = lambda: [path for path in of_user() if not path.startswith(ROOT)]


def share_references() -> None:
    """Let this rank take captures from the session's cache, the references of `verify` too, and make each only once.

    Every rank of every check captures the whole step twice, for training and for evaluation: four fifths of what a check of
    a small model takes. The entries are the references' own, so that a plan's capture is still held against another one.
    Ranks ask for the same captures at the same moment: one of them makes it, and the others wait.
    """
    from trainwright.capture import cached
    from trainwright.runtime.verification import reference

    leave_tests_out()
    cached.loaded_files = dict  # nor do other files change; an entry names thousands
    reference.capture = shared_reference
    cached.capture = shared_capture


def shared_reference(
    model: Any, batch: Any, loss_fn: Any = None, *, training: bool = True, autocast: Any = None
) -> Any:
    """Return what `capture` returns."""
    kind = "training" if training else "evaluation"
    return shared_capture(model, batch, loss_fn, f"-{kind}", training=training, autocast=autocast)


def shared_capture(model: Any, batch: Any, loss_fn: Any = None, kind: str = "", **options: Any) -> Any:
    """Return what `capture` returns, from the session's cache where a capture of this `kind` is there."""
    from trainwright.capture import cached
    from trainwright.capture.experts import know_gates
    from trainwright.capture.export import capture

    cache, key = cache_directory(), cached._key(model, batch, loss_fn, options["autocast"])
    if cache is None or key is None:
        return capture(model, batch, loss_fn, **options)
    know_gates(model)
    with only_one(key + kind):
        found = cached._read(cache, key + kind)
        if found is None:
            found = capture(model, batch, loss_fn, **options)
            cached._write(cache, key + kind, found)
    return found


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """Let one process at a time into the `with` block called `name`; the system lets go for one that is killed."""
    folder = cache_folder() / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
