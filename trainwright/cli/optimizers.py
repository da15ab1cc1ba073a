"""`trainwright optimizers`: what there is."""

from __future__ import annotations

from .output import JsonOption, answer, rows_as_table


def optimizers(json_path: JsonOption = None) -> None:
    """List the optimizers, with the bytes of state that each keeps per parameter."""
    from ..optim import table

    rows = table()
    answer(rows_as_table(rows), lambda: rows, json_path)
