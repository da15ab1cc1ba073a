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
from .tree import ModuleRow, module_rows
from .units import format_bytes, format_count, format_flops

_AREAS = {
    "saved bytes": (lambda cost: cost.saved_bytes, format_bytes),
    "parameter bytes": (lambda cost: cost.param_bytes, format_bytes),
    "FLOPs": (lambda cost: cost.forward_flops + cost.backward_flops, format_flops),
    "ops": (lambda cost: cost.num_ops, lambda count: f"{format_count(count)} ops"),
}


_PALETTE = ["#4477aa", "#33997f", "#8866aa", "#bb7733", "#cc6677", "#668844", "#557788", "#997755"]
_ROOT = "(all)"


def treemap_figure(modules: Iterable[ModuleCost]) -> Figure:
    """Return the modules as a treemap; `menu` holds what its area can show, for the page's buttons."""
    nodes = _treemap_nodes(module_rows(modules))
    menu = {name: _treemap_values(nodes, read, shown) for name, (read, shown) in _AREAS.items()}
    menu = {name: values for name, values in menu.items() if any(values["values"][0])}
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
        "marker": {"cornerradius": 3},
    }
    if menu:
        trace |= {key: value[0] for key, value in next(iter(menu.values())).items()}
    layout = {"margin": {"t": 10, "r": 10, "l": 10, "b": 10}, "height": 440, "treemapcolorway": _PALETTE}
    return {"data": [trace], "layout": layout, "menu": menu}


@dataclass(frozen=True)
class _Node:
    """A rectangle of the treemap: a module, or what a module costs beyond those in it (`itself`)."""

    id: str
    parent: str
    name: str
    row: ModuleRow
    below: tuple[ModuleRow, ...]
    itself: bool = False


def _treemap_nodes(rows: Sequence[ModuleRow]) -> list[_Node]:
    labels = {row.label for row in rows}
    parents = {row.label: _nearest_parent(row.label, labels) for row in rows}
    nodes = []
    for row in rows:
        below = tuple(other for other in rows if parents[other.label] == row.label)
        own_id, above = row.label or _ROOT, parents[row.label]
        times = f" ×{row.count}" if row.count > 1 else ""
        nodes.append(_Node(own_id, "" if above is None else above or _ROOT, (row.name or _ROOT) + times, row, below))
        if below:
            nodes.append(_Node(f"{own_id} itself", own_id, "itself", row, below, itself=True))
    return nodes


def _treemap_values(nodes: Sequence[_Node], read: Any, shown: Any) -> dict[str, Any]:
    """What `Plotly.restyle` takes: the area of each rectangle that has none inside, and the texts of all."""
    wholes = [read(node.row.cost) for node in nodes]
    rests = [max(0, whole - sum(read(row.cost) for row in node.below)) for node, whole in zip(nodes, wholes)]
    areas = [rest if node.itself or not node.below else 0 for node, rest in zip(nodes, rests)]
    texts = [
        [shown(rest if node.itself else whole), escape(node.row.label or _ROOT), escape(node.row.cost.type)]
        for node, whole, rest in zip(nodes, wholes, rests)
    ]
    return {"values": [areas], "customdata": [texts]}


def _nearest_parent(label: str, labels: set[str]) -> str | None:
    """The module that holds this one, of those that have a row; `None` for the root."""
    if not label:
        return None
    parent = label.rpartition(".")[0]
    return parent if not parent or parent in labels else _nearest_parent(parent, labels)
