"""What a training run that is interrupted says: at which step, what is saved, and how to go on."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .errors import INTERRUPTED, TERMINATED, Interrupted
from .output import command_line
from .ranks import is_first_rank, under_torchrun

Newest = Callable[[Path], tuple[Path, int] | None]


class _Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


@contextlib.contextmanager
def told_when_interrupted(
    steps: Callable[[], Sequence[dict[str, Any]]], num_steps: int, folder: str | None, newest: Newest | None = None
) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into `Interrupted`, which says what became of the run; its ranks have ended by then.

    steps: the events of the steps that were done. folder: of the checkpoints, if any were asked for. newest: finds the newest
    in it with the steps that it has behind it; default: those of planned runs.
    """
    with _terminable():
        try:
            yield
        except KeyboardInterrupt as error:
            by_signal = isinstance(error, _Terminated)
            status = TERMINATED if by_signal else INTERRUPTED
            text = ending(
                steps(), num_steps, folder, "ended by SIGTERM" if by_signal else "interrupted", newest or _of_plans
            )
            raise Interrupted(text if is_first_rank() else "", status) from None


def ending(
    steps: Sequence[dict[str, Any]], num_steps: int, folder: str | None, word: str = "interrupted",
    newest: Newest | None = None,
) -> str:  # fmt: skip
    """Return what to say of a run that has ended before its last step.

    >>> print(ending([{"step": 4}], 100, None))
    interrupted after step 5 of 100
    saved: nothing, since no checkpoint was asked for; --checkpoint DIR --checkpoint-every N would have
    """
    at = f"after step {steps[-1]['step'] + 1} of {num_steps}" if steps else "before the first step was done"
    return "\n".join([f"{word} {at}", *_saved(folder, newest or _of_plans)])


def _saved(folder: str | None, newest: Newest) -> list[str]:
    if folder is None:
        return ["saved: nothing, since no checkpoint was asked for; --checkpoint DIR --checkpoint-every N would have"]
    found = newest(Path(folder))
    if found is None:
        return [
            f"saved: nothing, no checkpoint in {folder} was complete yet; a smaller --checkpoint-every saves sooner"
        ]
    return [f"saved: {found[0]}, the state after step {found[1]}", f"to go on from there: {_resuming()}"]


def _of_plans(folder: Path) -> tuple[Path, int] | None:
    from ..runtime.checkpoint.checkpoint import complete, read_position

    found = next(reversed(complete(folder)), None)
    return None if found is None else (found, read_position(found)["step"] + 1)


def _resuming() -> str:
    """The command that was given, with --resume."""
    if under_torchrun():
        return "start the same command again, with --resume"
    given = command_line()
    return shlex.join(given if "--resume" in given else [*given, "--resume"])


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does.

    Not under torchrun, which sends it to ranks that may wait in a collective, where only the signal's default ends them.
    """
    if under_torchrun() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
