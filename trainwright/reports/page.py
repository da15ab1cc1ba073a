"""The HTML page that the reports share: one file, nothing fetched, light and dark, from 800 px up and down."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .wrapping import unbroken

ASSETS = Path(__file__).parent


@dataclass(frozen=True)
class Tile:
    """One number of the header; `share` (of 1) draws a bar under it, `bad` marks it."""

    label: str
    value: str
    remark: str = ""
    share: float | None = None
    bad: bool = False


@dataclass
class Page:
    """A page in the making: tiles, then sections of HTML and charts."""

    title: str
    subtitle: str
    tiles: Sequence[Tile] = ()
    _body: list[str] = field(default_factory=list)
    _figures: dict[str, Any] = field(default_factory=dict)

    def section(self, heading: str, *parts: str, lead: str = "") -> None:
        """Add a section; the parts are HTML, from `chart` or the caller's own (who escapes)."""
        lead_html = f'<p class="lead">{escape(lead)}</p>' if lead else ""
        self._body.append(f"<section><h2>{escape(heading)}</h2>{lead_html}{''.join(parts)}</section>")

    def chart(self, figure: dict[str, Any], label: str) -> str:
        """Keep a plotly figure and return its place in the page; `label` is what a screen reader says."""
        name = f"chart{len(self._figures)}"
        self._figures[name] = figure
        groups = [_menu(name, place, choices) for place, choices in enumerate(figure.get("menus", [])) if choices]
        menu = f'<div class="menus">{"".join(groups)}</div>' if groups else ""
        place = f'<div id="{name}" class="chart" role="figure" aria-label="{escape(label)}"></div>'
        return f'<div class="card">{menu}{place}</div>'

    def html(self) -> str:
        """Return the whole page."""
        figures = json.dumps(self._figures, ensure_ascii=False, separators=(",", ":"))
        return "\n".join(
            (
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(self.title)}</title><style>{_asset('page.css')}</style></head><body>",
                '<button type="button" id="theme" aria-label="light or dark">◐</button>',
                f"<header><h1>{escape(self.title)}</h1><p>{escape(self.subtitle)}</p></header>",
                f'<div class="tiles">{"".join(map(_tile, self.tiles))}</div>',
                f"<main>{''.join(self._body)}</main>",
                "<footer>Made by trainwright. This file stands alone: nothing is fetched.</footer>",
                f'<script type="application/gzip" id="figures">{_packed(figures)}</script>',
                f'<script type="application/gzip" id="plotly">{_packed_plotly()}</script>',
                f"<script>{_asset('page.js')}</script></body></html>\n",
            )
        )


def grid(*parts: str) -> str:
    """Put parts side by side where there is room."""
    return f'<div class="grid">{"".join(parts)}</div>'


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[int] = (),
    remarks: Iterable[str] = (),
    sortable: bool = False,
) -> str:
    """Return an HTML table; cells are HTML. The columns `numbers` stand to the right, a remark under its row.

    sortable: a click on a column's name sorts by it; cells of `number` by their value. Not together with remarks.
    """
    right = [' class="number"' if place in numbers else "" for place in range(len(columns))]
    head = "".join(f"<th{align}>{escape(column)}</th>" for column, align in zip(columns, right))
    body = "".join(
        f"<tr>{''.join(f'<td{align}>{unbroken(cell)}</td>' for cell, align in zip(row, right))}</tr>"
        + _remark(remark, len(columns))
        for row, remark in zip_longest(rows, remarks, fillvalue="")
    )
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value: float, shown: Callable[[float], str], of: float = 0) -> str:
    """Return the cell of a number that a table can be sorted by; with `of`, a bar under it says how much of that."""
    bar = f' class="bar" style="--share:{100 * min(1.0, value / of):.1f}%"' if of else ""
    return f'<data value="{value!r}"{bar}>{escape(shown(value))}</data>'


def best_mark(text: str) -> str:
    """Return the mark of the best row of a table."""
    return f'<span class="good best">{escape(text)}</span>'


def folded(summary: str, content: str, is_open: bool = False) -> str:
    """Return HTML that unfolds; `summary` and `content` are HTML."""
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{content}</details>"


def notes(texts: Iterable[str]) -> str:
    """Return remarks as a list, or nothing."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _remark(text: str, num_columns: int) -> str:
    return f'<tr class="remark"><td colspan="{num_columns}">{text}</td></tr>' if text else ""


def _menu(chart: str, place: int, choices: Iterable[str]) -> str:
    """Buttons of which one is pressed: what a chart shows."""
    buttons = "".join(
        f'<button type="button" data-chart="{chart}" data-menu="{place}" data-choice="{escape(choice)}">'
        f"{escape(choice)}</button>"
        for choice in choices
    )
    return f'<div class="menu" role="group">{buttons}</div>'


def _tile(tile: Tile) -> str:
    bar = ""
    if tile.share is not None:
        width = 100 * min(1.0, max(0.0, tile.share))
        bar = f'<div class="share"><div style="width:{width:.1f}%"></div></div>'
    return (
        f'<div class="tile{" bad" if tile.bad else ""}"><span>{escape(tile.label)}</span>'
        f"<strong>{escape(unbroken(tile.value))}</strong>{bar}<small>{escape(unbroken(tile.remark))}</small></div>"
    )


def _packed(text: str) -> str:
    """Text as the page unpacks it: gzip in base64, which holds nothing that could end the script it stands in."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


@cache
def _packed_plotly() -> str:
    """The library that draws the charts, in two fifths of its size."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs())


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf8")
