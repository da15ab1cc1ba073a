"""The tables of `zoo`, `optimizers`, `federated` and `sync` as data: printing them imports neither torch nor transformers.

The records beside the models and optimizers stay the only source. `python -m trainwright.cli.listings` writes the
tables from them, and a test compares the files with the records.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from ..artifacts.record import write_atomically

Rows = list[dict[str, Any]]
SOURCES = {
    "zoo": "trainwright.models.zoo",
    "optimizers": "trainwright.optim",
    "federated": "trainwright.federated",
    "sync": "trainwright.sync",
}
"""Each listing's name and the module whose `table()` makes it."""


def listing(name: str) -> Rows:
    """Return the rows of a listing as its file has them.

    >>> [row["name"] for row in listing("zoo")][:2]
    ['gpt2-tiny', 'gpt2']
    """
    rows: Rows = json.loads(_path(name).read_text(encoding="utf8"))
    return rows


def made(name: str) -> Rows:
    """Return the rows of a listing as the records have them; builds every model of the zoo."""
    rows: Rows = importlib.import_module(SOURCES[name]).table()
    return rows


def write_all() -> None:
    """Write the files of all listings anew, a line a row."""
    for name in SOURCES:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in made(name))
        write_atomically(_path(name), f"[\n{lines}\n]\n")


def _path(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.json")


if __name__ == "__main__":
    write_all()
