"""`trainwright zoo`: the models that there are."""

from __future__ import annotations

from .output import JsonOption, answer, quiet_stdout, rows_as_table


def zoo(json_path: JsonOption = None) -> None:
    """List the zoo's models: real architectures with random weights, nothing downloaded."""
    with quiet_stdout():
        from ..capture.zoo import table

        rows = table()
    answer(rows_as_table(rows, drop=("seq_len", "batch_size")), lambda: rows, json_path)
