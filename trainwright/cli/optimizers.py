"""`trainwright optimizers`: what there is."""

from __future__ import annotations

from .listings import listing
from .output import JsonOption, answer, rows_as_table


def optimizers(json_path: JsonOption = None) -> None:
    """List the optimizers, with the bytes of state that each keeps per parameter."""
    rows = listing("optimizers")
    answer(rows_as_table(rows), lambda: rows, json_path)
