"""`trainwright cache`: the captures that are kept for the next command."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts.cache_directory import LIMIT_BYTES, OFF, cache_directory
from ..reports.units import format_bytes


def cache(clear: Annotated[bool, typer.Option("--clear", help="Remove them all.")] = False) -> None:
    """Say where captures of models are kept and how much room they take; --clear removes them."""
    found = cache_directory()
    if found is None:
        print(f"no captures are kept: {OFF} is set, or their folder cannot be used")
        return
    if clear:
        found.clear()
    files = found.files()
    taken = sum(seen.st_size for _, seen in files)
    many = "file" if len(files) == 1 else "files"
    print(f"{found.path}: {len(files)} {many}, {format_bytes(taken)} of at most {format_bytes(LIMIT_BYTES)}")
