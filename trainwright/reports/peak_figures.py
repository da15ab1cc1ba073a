"""The chart of what is alive at the peak, by module and category.

Text that comes from a model or a user is escaped: plotly reads a subset of HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..artifacts import ModuleCost
from .figures import COLORS, Figure, unit_of
from .tree import ModuleRow, children_of, module_rows
from .units import category_name, format_bytes

_MAX_PARTS = 12
_MAX_LABEL = 26


@dataclass(frozen=True)
class Part:
    """A module with all below it, or (`itself`) without; and what of it is alive, by category."""

    row: ModuleRow
    alive: Counter[str]
    itself: bool = False

    @property
    def num_bytes(self) -> int:
        return self.alive.total()

    @property
    def label(self) -> str:
        name = self.row.label or "(all)"
        if self.itself:
            return f"{name} itself" if self.row.label else "(outside of modules)"
        return name + (f" ×{self.row.count}" if self.row.count > 1 else "")


def peak_parts(modules: Iterable[ModuleCost], limit: int = _MAX_PARTS) -> list[Part]:
    """Return at most about `limit` parts of the model that together are all that is alive at the peak, largest first.

    The whole is split into its modules, then again and again the largest part.
    """
    rows = module_rows(modules)
    below = children_of(rows)
    parts = [Part(row, Counter(row.cost.at_peak_bytes)) for row in below[None]]
    settled: list[Part] = []
    while parts and len(parts) + len(settled) < limit:
        largest = max(parts, key=lambda part: part.num_bytes)
        parts.remove(largest)
        pieces = _pieces(largest, below[largest.row.label])
        if len(pieces) < 2 and not any(not piece.itself for piece in pieces):
            settled.append(largest)
            continue
        settled += [piece for piece in pieces if piece.itself]
        parts += [piece for piece in pieces if not piece.itself]
    return sorted((*parts, *settled), key=lambda part: -part.num_bytes)


def peak_figure(modules: Iterable[ModuleCost]) -> Figure:
    """Return what is alive at the peak as one bar a module, stacked by category in the colours of all charts."""
    parts = peak_parts(modules)[::-1]
    scale, unit = unit_of(max((part.num_bytes for part in parts), default=1))
    data = [_bar(category, parts, scale) for category in COLORS if any(_alive(part, category) for part in parts)]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {
            "automargin": True,
            "tickvals": list(range(len(parts))),
            "ticktext": [escape(_short(part.label)) for part in parts],
        },
        "showlegend": False,
        "margin": {"t": 10, "r": 20, "l": 20, "b": 50},
        "height": 400,
    }
    return {"data": data, "layout": layout}


def _pieces(part: Part, below: Sequence[ModuleRow]) -> list[Part]:
    """What a part consists of: the modules in it that hold anything, and the rest."""
    inside = [Part(row, Counter(row.cost.at_peak_bytes)) for row in below]
    rest = part.alive.copy()
    for piece in inside:
        rest.subtract(piece.alive)
    own = Part(part.row, +rest, itself=True)
    return [piece for piece in (*inside, own) if piece.num_bytes]


def _alive(part: Part, category: str) -> int:
    """The bytes of a category; `other` is all that has no colour of its own."""
    if category != "other":
        return part.alive[category]
    return sum(size for name, size in part.alive.items() if name == "other" or name not in COLORS)


def _bar(category: str, parts: Sequence[Part], scale: float) -> Figure:
    sizes = [_alive(part, category) for part in parts]
    return {
        "type": "bar",
        "orientation": "h",
        "name": category_name(category),
        "y": list(range(len(parts))),
        "x": [size / scale for size in sizes],
        "customdata": [
            [format_bytes(size), escape(part.label), format_bytes(part.num_bytes)] for part, size in zip(parts, sizes)
        ],
        "hovertemplate": f"<b>%{{customdata[1]}}</b><br>{category_name(category)} %{{customdata[0]}} of %{{customdata[2]}}"
        "<extra></extra>",
        "marker": {"color": COLORS[category]},
    }


def _short(label: str) -> str:
    """The end of a long label, which tells more than its beginning, from a dot on where there is one."""
    if len(label) <= _MAX_LABEL:
        return label
    end = label[-_MAX_LABEL:]
    return "…" + (end[end.index(".") + 1 :] if "." in end else end)
