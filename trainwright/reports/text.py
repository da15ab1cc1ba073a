"""What the terminal's tables share: how they look, how wide they are, and whether they have colours."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_MAX_WIDTH, _FILE_WIDTH = 140, 150


def plain_table(*columns: str, header: bool = True, left: int = 1) -> Table:
    """A plain table: the first `left` columns and the last unnamed one to the left, numbers to the right."""
    table = Table(box=SIMPLE_HEAD if header else None, pad_edge=False, show_header=header, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        is_remark = place == len(columns) - 1 and not column
        table.add_column(column, justify="left" if place < left or is_remark else "right", overflow="fold")
    return table


def title_line(*parts: str) -> Text:
    """The first line of a report: its subject, and what else is known of it."""
    first, *rest = (part for part in parts if part)
    return Text.assemble((first, "bold"), *(f" · {part}" for part in rest))


def note_lines(notes: Iterable[str]) -> list[RenderableType]:
    """Return remarks as lines."""
    return [Text(f"note: {note}", style="dim") for note in notes]


def width() -> int:
    """Return the columns that a report may take: the terminal's, or many in a file."""
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH) if sys.stdout.isatty() else _FILE_WIDTH


def rendered(*parts: RenderableType) -> str:
    """Render for the terminal there is, or for a file: wide, and without colours."""
    console = Console(file=io.StringIO(), width=width(), force_terminal=sys.stdout.isatty(), highlight=False)
    for place, part in enumerate(parts):
        console.print(Padding(part, (int(place > 0 and isinstance(part, Table) and part.box is None), 0, 0, 0)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines).strip("\n")) + "\n"
