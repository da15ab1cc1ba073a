"""`trainwright federated`: the strategies that there are."""

from __future__ import annotations

from .listings import listing
from .output import JsonOption, answer, rows_as_table

_LEAST_TELLING = ("paper", "gradients a step", "what it does", "assumes")
"""Columns that a narrow terminal has no room for, the first to go first."""


def federated(json_path: JsonOption = None) -> None:
    """List the federated strategies: what server and client keep, what each piece of work sends, what they assume.

    P is the bytes of one copy of the model. A narrow terminal has no room for every column; --json has them all.
    """
    rows = listing("federated")
    answer(rows_as_table(rows, drop=_LEAST_TELLING), lambda: rows, json_path)
