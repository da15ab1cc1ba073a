"""A solver's run as an HTML file that stands alone: how it ended, and its history."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifacts.record import write_atomically
from .figures import COLORS, MEASURED, Figure
from .page import Page, Tile, table

_MOST_ROWS = 12


def write_solved(record: Mapping[str, Any], path: str | os.PathLike[str], problem: str) -> None:
    """Write the run of `trainwright solve`, the record of its JSON, to a page: tiles, curves, the history's last rows."""
    page = Page(title=f"{record['solver']} on {problem}", subtitle=record["message"], tiles=_tiles(record))
    history: Mapping[str, Sequence[float | None]] = record["history"]
    for column, heading, lead in (
        ("residual", "Residual", "What the tolerance is held against, at each measurement."),
        ("fun", "Objective", "At each measurement."),
    ):
        if _known(history.get(column, ())):
            page.section(heading, page.chart(history_figure(history, column), f"{heading} by iteration"), lead=lead)
    if history:
        page.section("The last measurements", _rows(history), lead=f"{len(history['nit'])} in all; the JSON has each.")
    write_atomically(Path(path), page.html())


def history_figure(history: Mapping[str, Sequence[float | None]], column: str) -> Figure:
    """Return a column of a history over the iterations; on a logarithmic axis where it is positive and falls a decade."""
    values = history[column]
    known = _known(values)
    is_log = min(known) > 0 and max(known) > 10 * min(known)
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if len(known) <= 40 else "lines",
        "x": list(history["nit"]),
        "y": list(values),
        "connectgaps": True,
        "line": {"color": COLORS["param"] if column == "residual" else MEASURED, "width": 2},
        "hovertemplate": "iteration %{x}: %{y:.4g}<extra></extra>",
    }
    axis: dict[str, Any] = {"title": {"text": "residual" if column == "residual" else "objective"}}
    if is_log:
        axis |= {"type": "log", "exponentformat": "power", "dtick": 1 if max(known) < 1e8 * min(known) else None}
    layout = {
        "xaxis": {"title": {"text": "iteration"}},
        "yaxis": axis,
        "showlegend": False,
        "margin": {"t": 20, "r": 30, "l": 80, "b": 50},
        "height": 360,
    }
    return {"data": [trace], "layout": layout}


def _tiles(record: Mapping[str, Any]) -> list[Tile]:
    residuals = _known(record["history"].get("residual", ()))
    tiles = [Tile("ended", record["status"].lower().replace("_", " "), bad=not record["success"])]
    tiles += [Tile("objective", f"{record['fun']:.6g}")] if record["fun"] is not None else []
    tiles += [Tile("residual", f"{residuals[-1]:.3g}", f"{residuals[0]:.3g} at the start")] if residuals else []
    return [
        *tiles,
        Tile("iterations", str(record["nit"])),
        Tile("evaluations", str(record["nfev"])),
        Tile("seconds", f"{record['seconds']:.3g}"),
    ]


def _rows(history: Mapping[str, Sequence[float | None]]) -> str:
    columns = list(history)
    rows = list(zip(*(history[column] for column in columns)))[-_MOST_ROWS:]
    return table(columns, [[_cell(value) for value in row] for row in rows], numbers=range(len(columns)))


def _cell(value: float | None) -> str:
    return (
        "–" if value is None else (f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}")
    )


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
