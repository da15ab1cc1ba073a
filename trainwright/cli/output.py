"""What goes to standard output, and what does not: answers there, progress and remarks on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts.record import write_atomically
from ..reports.wrapping import for_stream

PROGRAM = "trainwright"
STDOUT = "-"
_given: ContextVar[tuple[str, ...]] = ContextVar("_given", default=())
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the answer as JSON; - is standard output.")
]
HtmlOption = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a report that stands alone.")]


def answer(text: str, data: Callable[[], Any], json_path: str | None) -> None:
    """Print `text`, or where the JSON goes to standard output only that; write it to a file otherwise.

    `data()` is JSON text, or something that JSON can say.
    """
    if json_path != STDOUT:
        print(text)
    write_json(data, json_path)


def write_json(data: Callable[[], Any], json_path: str | None) -> None:
    """Write `data()` to the path, to standard output for `-`, nowhere for `None`."""
    if json_path is None:
        return
    found = data()
    rendered = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, indent=1)
    if json_path == STDOUT:
        sys.stdout.write(rendered.rstrip("\n") + "\n")
    else:
        write_atomically(Path(json_path), rendered.rstrip("\n") + "\n")


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what anything else prints (the user's model, C++ libraries, child processes) to standard error meanwhile.

    Under this the verbs do their work, so that standard output holds their answer and nothing else.
    """
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr), _stdout_as_stderr():
        yield


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """The same for what does not go through `sys.stdout`."""
    try:
        saved = os.dup(1)
    except OSError:
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 1)
        os.close(saved)


def command_line() -> list[str]:
    """Return the command that is being run, as it was given; the program alone outside of one."""
    return [PROGRAM, *_given.get()]


@contextlib.contextmanager
def running(arguments: Sequence[str]) -> Iterator[None]:
    """Let `command_line` tell these arguments meanwhile."""
    token = _given.set(tuple(arguments))
    try:
        yield
    finally:
        _given.reset(token)


def remark(text: str) -> None:
    """Say something on standard error."""
    print(text, file=sys.stderr)


def remarks(notes: Iterable[str]) -> None:
    """Say each note on standard error."""
    for note in notes:
        remark(for_stream(f"note: {note}", sys.stderr))


@contextlib.contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error, where that is a terminal, what is being done; the function given changes the text."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as shown:
        yield lambda more: shown.update(f"{text}: {more}")


def rows_as_table(rows: Iterable[Mapping[str, Any]], drop: Sequence[str] = ()) -> str:
    """Return rows of the same keys as a table; on a narrow terminal without the columns `drop`, the first of them first."""
    from ..reports.terminal import rows_table

    return rows_table(rows, drop)
