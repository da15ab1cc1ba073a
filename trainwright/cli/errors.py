"""What the user sees when something goes wrong, and the exit status that scripts see."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from ..artifacts import Refusal, UserError
from ..reports.wrapping import for_stream

OK, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
DEBUG_VARIABLE = "TRAINWRIGHT_DEBUG"


class Interrupted(RuntimeError):
    """A command was ended from outside (Ctrl-C, SIGTERM); the text says what became of its work."""

    def __init__(self, text: str, status: int = INTERRUPTED) -> None:
        super().__init__(text)
        self.status = status


def status_of(action: Callable[[], int | None]) -> int:
    """Run `action` and return its exit status; an exception becomes `error: …` on standard error and its status."""
    try:
        return action() or OK
    except BrokenPipeError:
        _close_stdout()
        return FAILED
    except (KeyboardInterrupt, Exception) as error:
        if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
            traceback.print_exc()
        text, status = explain(error)
        if text:
            # a command that is to be copied stays in one line
            print(text if isinstance(error, Interrupted) else for_stream(text, sys.stderr), file=sys.stderr)
        return status


def explain(error: BaseException) -> tuple[str, int]:
    """Return what to print for `error` and the exit status.

    >>> explain(UserError("a plan is needed; got a poem; try `plan`"))
    ('error: a plan is needed; got a poem; try `plan`', 2)
    """
    if isinstance(error, UserError):
        return f"error: {error}", USER_ERROR
    if isinstance(error, Refusal):
        return f"error: {error}", FAILED
    if isinstance(error, Interrupted):
        return str(error), error.status
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        return "interrupted", INTERRUPTED
    if hasattr(error, "format_message"):  # a command line that typer cannot read
        return f"error: {_usage(error)}", USER_ERROR
    return f"error: {_failure(error)}", FAILED


def _usage(error: BaseException) -> str:
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trainwright"
    return f"{message[:1].lower()}{message[1:]}; see `{command} --help`"


def _failure(error: BaseException) -> str:
    """A failure that nobody foresaw: what it says, and how to see where."""
    text = str(error) or type(error).__name__
    if type(error).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return text
    return f"{type(error).__name__}: {text} (set {DEBUG_VARIABLE}=1 to see where)"


def _close_stdout() -> None:
    """Whoever read our output has gone (`| head`): keep the interpreter from complaining about it at its end."""
    sys.stdout = open(os.devnull, "w", encoding="utf8")  # noqa: SIM115 - it lives as long as the process
