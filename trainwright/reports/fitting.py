"""Which devices can train a model: a table for the terminal, and the same as a page."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from rich.text import Text

from ..artifacts import FitOn, Fitting
from ..artifacts.record import write_atomically
from .page import Page, table
from .sections import notes_section
from .text import note_lines, plain_table, rendered, title_line
from .units import format_bytes, format_s

__all__ = ["fitting_table", "write_fitting"]
_COLUMNS = ("device", "way", "fits", "peak", "of", "step", "examples/s", "with")
_DASH = "–"
_WAYS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def fitting_table(fitting: Fitting) -> str:
    """Return the rows for the terminal."""
    grid = plain_table(*_COLUMNS, right=("peak", "of", "step", "examples/s"), drop=("examples/s", "step"))
    for row in fitting.rows:
        cells = _cells(row)
        cells[2] = Text("yes", style="green") if row.fits else Text("no", style="red")
        grid.add_row(*cells)
    return rendered(_title(fitting), grid, *note_lines(fitting.notes))


def write_fitting(fitting: Fitting, path: str | os.PathLike[str]) -> None:
    """Write the rows as a page."""
    page = Page(fitting.model, _title(fitting).plain.partition(" · ")[2])
    rows = []
    for row in fitting.rows:
        cells = [escape(str(cell)) for cell in _cells(row)]
        cells[2] = '<span class="good">yes</span>' if row.fits else '<span class="wrong">no</span>'
        rows.append(cells)
    lead = "As asked where that fits, else with the fewest changes that make it fit; each row is a profile."
    page.section(
        "Which devices can train it",
        f'<div class="card">{table(_COLUMNS, rows, numbers=(3, 4, 5, 6))}</div>',
        lead=lead,
    )
    notes_section(page, fitting.notes)
    write_atomically(Path(path), page.html())


def _title(fitting: Fitting) -> Text:
    return title_line(fitting.model, fitting.dtype, fitting.optimizer, "one step on one device")


def _cells(row: FitOn) -> list[str | Text]:
    changed = row.problem or ", ".join(row.changes)
    return [
        row.device, _WAYS.get(row.way, row.way), "yes" if row.fits else "no", format_bytes(row.peak_bytes),
        format_bytes(row.budget_bytes), format_s(row.step_s),
        _DASH if row.samples_per_s is None else f"{row.samples_per_s:.3g}", changed,
    ]  # fmt: skip
