"""The command `trainwright`: its verbs, and how an answer becomes an exit status.

Each verb is a module of its own, imported here; none of them imports torch before it has to, so that `--help` and
`--version` answer at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from . import (
    cache,
    calibrate,
    check,
    demo,
    diff,
    examples,
    explain,
    export,
    federated,
    optimizers,
    plan,
    profile,
    selfcheck,
    solve,
    sweep,
    sync,
    train,
    verify,
    zoo,
)
from .errors import INTERRUPTED, status_of
from .output import PROGRAM, running
from .tiers import TakesTier

_EPILOG = "MODEL is zoo:NAME, FILE.py:function or package.module:function. Hardware: cpu:4, 8xh200, or a JSON file."

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

for _verb in (
    profile,
    diff,
    plan,
    check,
    explain,
    train,
    export,
    verify,
    solve,
    sweep,
    calibrate,
    selfcheck,
    optimizers,
    federated,
    sync,
    zoo,
    cache,
    examples,
    demo,
):
    _name = _verb.__name__.rpartition(".")[2]
    app.command(_name, cls=TakesTier if _verb is plan else None)(getattr(_verb, _name))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` and return the exit status; see `main`."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]

    def command() -> int | None:
        with running(given):
            status = app(given, prog_name=PROGRAM, standalone_mode=False)
        if status == INTERRUPTED:  # newer releases of typer return it, older ones raise
            raise KeyboardInterrupt
        return status

    return status_of(command)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=lambda on: _version(on)),
    ] = False,
) -> None:
    """How should this PyTorch model be trained on this hardware? Profile it, plan it, run the plan."""


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"trainwright {__version__}")
        raise typer.Exit
