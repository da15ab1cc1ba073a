"""`trainwright zoo`: the models that there are."""

from __future__ import annotations

from ..artifacts import is_installed
from .listings import listing
from .output import JsonOption, answer, remark, rows_as_table


def zoo(json_path: JsonOption = None) -> None:
    """List the zoo's models: real architectures with random weights, nothing downloaded."""
    rows = listing("zoo")
    if not is_installed("transformers"):
        remark(
            "note: all of them need the package transformers, which is not installed; try pip install 'transformers>=5.0'"
        )
    answer(rows_as_table(rows, drop=("seq_len", "batch_size")), lambda: rows, json_path)
