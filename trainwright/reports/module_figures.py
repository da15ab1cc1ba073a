"""The chart of a model's modules by what they cost.

Text that comes from a model or a user is escaped: plotly reads a subset of HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..artifacts import ModuleCost
from .figures import Figure
from .measures import MEASURES
from .tree import ModuleRow, children_of, module_rows

_PALETTE = ["#4477aa", "#33997f", "#8866aa", "#bb7733", "#cc6677", "#668844", "#557788", "#997755"]
_ROOT = "(all)"


def modules_figure(modules: Iterable[ModuleCost]) -> Figure:
    """Return the modules as a treemap or an icicle; `menus` holds what its area can show, and its two forms."""
    nodes = _nodes(module_rows(modules))
    areas = {measure.label: _values(nodes, measure.read, measure.shown) for measure in MEASURES.values()}
    areas = {name: values for name, values in areas.items() if any(values["values"][0])}
    forms = {form: {"type": [form]} for form in ("treemap", "icicle")}
    trace = {
        "type": "treemap",
        "ids": [node.id for node in nodes],
        "labels": [escape(node.name) for node in nodes],
        "parents": [node.parent for node in nodes],
        "branchvalues": "remainder",
        "texttemplate": "%{label}<br>%{customdata[0]}",
        "hovertemplate": "<b>%{customdata[1]}</b><br>%{customdata[2]}<br>%{customdata[0]}<extra></extra>",
        "maxdepth": 4,
        "tiling": {"pad": 2},
        "root": {"color": "rgba(128,128,128,0.15)"},
    }
    if areas:
        trace |= {key: value[0] for key, value in next(iter(areas.values())).items()}
    colors = {"treemapcolorway": _PALETTE, "iciclecolorway": _PALETTE}
    layout = {"margin": {"t": 10, "r": 10, "l": 10, "b": 10}, "height": 440, **colors}
    return {"data": [trace], "layout": layout, "menus": [areas, forms]}


@dataclass(frozen=True)
class _Node:
    """A rectangle of the treemap: a module, or what a module costs beyond those in it (`itself`)."""

    id: str
    parent: str
    name: str
    row: ModuleRow
    below: tuple[ModuleRow, ...]
    itself: bool = False


def _nodes(rows: Sequence[ModuleRow]) -> list[_Node]:
    children = children_of(rows)
    parents = {child.label: label for label, below in children.items() for child in below}
    nodes = []
    for row in rows:
        below = tuple(children[row.label])
        own_id, above = row.label or _ROOT, parents[row.label]
        times = f" ×{row.count}" if row.count > 1 else ""
        nodes.append(_Node(own_id, "" if above is None else above or _ROOT, (row.name or _ROOT) + times, row, below))
        if below:
            nodes.append(
                _Node(
                    f"{own_id} itself",
                    own_id,
                    "itself" if row.label else "(outside of modules)",
                    row,
                    below,
                    itself=True,
                )
            )
    return nodes


def _values(nodes: Sequence[_Node], read: Any, shown: Any) -> dict[str, Any]:
    """What `Plotly.restyle` takes: the area of each rectangle that has none inside, and the texts of all."""
    wholes = [read(node.row.cost) for node in nodes]
    rests = [max(0, whole - sum(read(row.cost) for row in node.below)) for node, whole in zip(nodes, wholes)]
    areas = [rest if node.itself or not node.below else 0 for node, rest in zip(nodes, rests)]
    texts = [
        [shown(rest if node.itself else whole), escape(node.row.label or _ROOT), escape(node.row.cost.type)]
        for node, whole, rest in zip(nodes, wholes, rests)
    ]
    return {"values": [areas], "customdata": [texts]}
