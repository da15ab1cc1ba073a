"""`trainwright optimizers`: what there is."""

from __future__ import annotations

from .output import JsonOption, answer, rows_as_table

_LEAST_TELLING = ("paper", "state B/param bf16", "passes", "reads", "state B/param fp32")
"""Columns that a narrow terminal has no room for, the first to go first."""


def optimizers(json_path: JsonOption = None) -> None:
    """List the optimizers, with the bytes of state that each keeps per parameter.

    A narrow terminal has no room for every column; --json has them all.
    """
    from ..optim import table

    rows = table()
    answer(rows_as_table(rows, drop=_LEAST_TELLING), lambda: rows, json_path)
