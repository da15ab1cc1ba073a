"""`trainwright sync`: the ways for workers to agree that there are."""

from __future__ import annotations

from .listings import listing
from .output import JsonOption, answer, rows_as_table

_LEAST_TELLING = ("paper", "extra passes", "assumes", "a worker gone or slow", "promises", "what it does")
"""Columns that a narrow terminal has no room for, the first to go first."""


def sync(json_path: JsonOption = None) -> None:
    """List the sync methods: what a worker sends each step, the state it keeps, what is promised and assumed.

    P is the bytes of one copy of the parameters, n the number of workers. A narrow terminal has no room for every
    column; --json has them all.
    """
    rows = listing("sync")
    answer(rows_as_table(rows, drop=_LEAST_TELLING), lambda: rows, json_path)
