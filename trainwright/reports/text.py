"""What the terminal's tables share: how they look, how wide they are, and whether they have colours."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .wrapping import least_width, lines

_MAX_WIDTH = 140
_GAP = 2
_READABLE = 24
"""Columns that a text should have before another column of the table has to go."""


@dataclass(eq=False)
class Grid:
    """A table that fits the terminal: text wraps at words, names between their parts, numbers stay with their units.

    Where that is not enough, whole columns are left out, those in `drop` first, and a line under the table names them.
    """

    columns: tuple[str, ...]
    header: bool = True
    right: frozenset[int] = frozenset()
    """The columns whose cells stand to the right."""
    drop: tuple[str, ...] = ()
    _rows: list[tuple[list[Text], str]] = field(default_factory=list)

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; cells that are missing at its end are empty."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append((texts + [Text()] * (len(self.columns) - len(texts)), style))

    def natural_width(self) -> int:
        """Return the columns that the table takes where nothing is wrapped."""
        return self._total(range(len(self.columns)), [self._natural(place) for place in range(len(self.columns))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, widths = self._fitted(options.max_width)
        yield self._table(shown, widths)
        if missing := [name for place, name in enumerate(self.columns) if place not in shown and name]:
            yield wrapped_text(
                Text(f"not shown in {options.max_width} columns: {', '.join(missing)}", "dim"), options.max_width
            )

    # Widths

    def _fitted(self, room: int) -> tuple[list[int], list[int]]:
        """The columns that are shown, and the width of each."""
        shown = list(range(len(self.columns)))
        natural = [self._natural(place) for place in shown]
        least = [max((least_width(cell.plain) for cell in self._cells(place)), default=0) for place in shown]
        wanted = [max(low, min(full, _READABLE)) for low, full in zip(least, natural)]
        for name in self.drop:
            if self._total(shown, wanted) <= room:
                break
            shown = [place for place in shown if self.columns[place] != name]
        smallest = wanted if self._total(shown, wanted) <= room else least
        slack = room - self._total(shown, smallest)
        given = _shared(slack, [natural[place] - smallest[place] for place in shown])
        return shown, [smallest[place] + more for place, more in zip(shown, given)]

    def _total(self, shown: Iterable[int], widths: Sequence[int]) -> int:
        """The width of the table with these columns; `widths` has all of them."""
        places = list(shown)
        frame = len(places) + 1 if self.header else 0  # the box has a blank at each side of a column
        return sum(widths[place] for place in places) + _GAP * (len(places) - 1) + frame

    def _natural(self, place: int) -> int:
        return max((Text(line).cell_len for cell in self._cells(place) for line in cell.plain.split("\n")), default=0)

    def _cells(self, place: int) -> list[Text]:
        return [Text(self.columns[place] if self.header else ""), *(cells[place] for cells, _ in self._rows)]

    # Drawing

    def _table(self, shown: Sequence[int], widths: Sequence[int]) -> Table:
        box = SIMPLE_HEAD if self.header else None
        table = Table(box=box, pad_edge=False, show_header=self.header, padding=(0, _GAP, 0, 0))
        for place, width in zip(shown, widths):
            name = self.columns[place]
            justify: Literal["left", "right"] = "right" if place in self.right else "left"
            table.add_column(wrapped_text(Text(name), width), justify=justify, width=width, no_wrap=True)
        for cells, style in self._rows:
            table.add_row(*(wrapped_text(cells[place], width) for place, width in zip(shown, widths)), style=style)
        return table


def plain_table(
    *columns: str, header: bool = True, left: int = 1, right: Sequence[str] | None = None, drop: Sequence[str] = ()
) -> Grid:
    """A plain table: the first `left` columns and the last unnamed one to the left, numbers to the right.

    right: the names of the columns that stand to the right, in place of `left`. drop: the columns that are left out where
    the terminal is too narrow, in this order.
    """
    if right is not None:
        places = [place for place, column in enumerate(columns) if column in right]
    else:
        end = len(columns) if columns[-1] else len(columns) - 1
        places = list(range(left, end))
    return Grid(columns, header, frozenset(places), tuple(drop))


def title_line(*parts: str) -> Text:
    """The first line of a report: its subject, and what else is known of it."""
    first, *rest = (part for part in parts if part)
    return Text.assemble((first, "bold"), *(f" · {part}" for part in rest))


def note_lines(notes: Iterable[str]) -> list[RenderableType]:
    """Return remarks as lines."""
    return [Text(f"note: {note}", style="dim") for note in notes]


def wrapped_text(text: Text, width: int) -> Text:
    """Return `text` in lines of at most `width` columns; those after the first keep its indentation."""
    indent = len(text.plain) - len(text.plain.lstrip(" "))
    body, margin = text[indent:], Text(" " * indent)
    return Text("\n").join(margin + body[start:end] for start, end in lines(body.plain, max(1, width - indent)))


def rendered(*parts: RenderableType) -> str:
    """Render for the terminal there is, or for a file: as wide as need be, and without colours."""
    in_terminal = sys.stdout.isatty()
    room = min(shutil.get_terminal_size().columns, _MAX_WIDTH) if in_terminal else max(map(_natural_width, parts))
    console = Console(file=io.StringIO(), width=room, force_terminal=in_terminal, highlight=False)
    for before, part in zip_longest([None, *parts[:-1]], parts):
        gap = before is not None and isinstance(part, Grid) and not part.header
        shown = wrapped_text(part, room) if isinstance(part, Text) else part
        console.print(Padding(shown, (int(gap), 0, 0, 0)))
    found = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in found).strip("\n")) + "\n"


def _natural_width(part: RenderableType) -> int:
    if isinstance(part, Grid):
        return part.natural_width()
    return max((line.cell_len for line in part.split("\n")), default=1) if isinstance(part, Text) else _MAX_WIDTH


def _shared(slack: int, needs: Sequence[int]) -> list[int]:
    """Share `slack` columns out: who needs least gets all of it first, the others the same each."""
    given = [0] * len(needs)
    left = max(0, slack)
    for count, place in enumerate(sorted(range(len(needs)), key=lambda place: needs[place])):
        given[place] = min(needs[place], left // (len(needs) - count))
        left -= given[place]
    return given
