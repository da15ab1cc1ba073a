"""The command line: the library's verbs, one file a command."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`None`: the process's own arguments) and return the exit status.

    0: done. 1: a valid question was answered *no*, or a run failed. 2: the user's mistake. 130: interrupted.
    """
    from .app import run

    return run(arguments)
