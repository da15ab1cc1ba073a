"""The modules of a profile as a tree in which blocks that cost the same are one row."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..artifacts import ModuleCost

BLOCK_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""The number of a block in a path."""


@dataclass(frozen=True)
class ModuleRow:
    """A module, or `count` modules that cost the same; `cost` is their sum."""

    label: str
    level: int
    """The root is 0; the number of a block is no level of its own."""
    count: int
    cost: ModuleCost
    num_folded: int = 0
    """For a row that stands for several small modules: how many rows it hides."""

    @property
    def name(self) -> str:
        """The last part of the path; a block's with the name of what holds the blocks."""
        *above, last = self.label.split(".")
        return f"{above[-1]}.{last}" if above and _is_number(last) else last


def module_rows(modules: Iterable[ModuleCost], depth: int | None = None) -> list[ModuleRow]:
    """Return the tree in the model's order, down to `depth` levels.

    >>> block = dict(type="Linear", num_params=6)
    >>> costs = [ModuleCost(path=path, **block) for path in ("h.0", "h.1")]
    >>> [(row.label, row.count, row.cost.num_params) for row in module_rows(costs)]
    [('h.{0-1}', 2, 12)]
    """
    modules = list(modules)
    names = _collapsed_names(modules)
    grouped: dict[str, list[ModuleCost]] = defaultdict(list)
    for module in modules:
        grouped[names[module.path]].append(module)
    rows = [ModuleRow(label, _level(label), len(members), sum_of(label, members)) for label, members in grouped.items()]
    rows = [row for row, following in zip(rows, [*rows[1:], None]) if not _is_repeated(row, following)]
    return [row for row in rows if depth is None or row.level <= depth]


def children_of(rows: Sequence[ModuleRow]) -> dict[str | None, list[ModuleRow]]:
    """Return the rows that lie directly in each row, by its label; those in none stand under `None`."""
    labels = {row.label for row in rows}
    below: dict[str | None, list[ModuleRow]] = defaultdict(list)
    for row in rows:
        below[_nearest_parent(row.label, labels)].append(row)
    return below


def short_op(name: str) -> str:
    """Return a text without the namespace of the ops in it.

    >>> short_op("aten.mm.default"), short_op("backward: aten.mm in lm_head")
    ('mm', 'backward: mm in lm_head')
    """
    return re.sub(r"\baten(\.|::)", "", name).replace(".default", "")


def _collapsed_names(modules: list[ModuleCost]) -> dict[str, str]:
    """Map each path to one in which runs of equal siblings (`h.0`, `h.1`, …) are written as a range (`h.{0-1}`)."""
    signatures = _signatures(modules)
    siblings: dict[str, list[int]] = defaultdict(list)
    for path in signatures:
        parent, _, last = path.rpartition(".")
        if last.isdigit():
            siblings[parent].append(int(last))
    ranges: dict[str, str] = {}
    for parent, numbers in siblings.items():
        dot = f"{parent}." if parent else ""
        for run in _runs(sorted(numbers), lambda number, dot=dot: signatures[f"{dot}{number}"]):  # type: ignore[misc]
            text = f"{{{run[0]}-{run[-1]}}}" if len(run) > 1 else str(run[0])
            ranges.update({f"{dot}{number}": text for number in run})
    return {path: _renamed(path, ranges) for path in signatures}


def _signatures(modules: list[ModuleCost]) -> dict[str, tuple[object, ...]]:
    """What two modules have in common when they cost the same, all below them included."""
    own = {module.path: _comparable(module, {"path"}) for module in modules}
    below: dict[str, list[tuple[str, object]]] = defaultdict(list)
    for path, costs in own.items():
        parts = path.split(".") if path else []
        for level in range(len(parts)):
            below[".".join(parts[:level])].append((".".join(parts[level:]), costs))
    return {path: (*costs, tuple(below[path])) for path, costs in own.items()}


def _comparable(cost: ModuleCost, exclude: set[str]) -> tuple[object, ...]:
    """A cost without what differs between equal blocks: what is alive just then, and the rounding of seconds."""
    return tuple(cost.model_dump(exclude={*exclude, "at_peak_bytes", "forward_s", "backward_s"}).values())


def _runs(numbers: list[int], signature) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """Split into consecutive numbers of one signature."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and signature(number) == signature(runs[-1][-1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _renamed(path: str, ranges: dict[str, str]) -> str:
    parts = path.split(".") if path else []
    return ".".join(ranges.get(".".join(parts[: place + 1]), part) for place, part in enumerate(parts))


def _is_repeated(row: ModuleRow, following: ModuleRow | None) -> bool:
    """Whether the next row, the blocks of this container, says all that this one does."""
    if following is None or not row.label or following.label.rpartition(".")[0] != row.label:
        return False
    same = _comparable(following.cost, {"path", "type"}) == _comparable(row.cost, {"path", "type"})
    return same and _is_number(following.label.rpartition(".")[2])


def _is_number(part: str) -> bool:
    return re.fullmatch(r"\d+|\{\d+-\d+\}", part) is not None


def _level(label: str) -> int:
    """How deep a module is; the number of a block counts where nothing else names the blocks."""
    parts = label.split(".") if label else []
    return sum(place == 0 or not _is_number(part) for place, part in enumerate(parts))


def _nearest_parent(label: str, labels: set[str]) -> str | None:
    """The module that holds this one, of those that have a row; `None` for the root."""
    if not label:
        return None
    parent = label.rpartition(".")[0]
    return parent if not parent or parent in labels else _nearest_parent(parent, labels)


def sum_of(label: str, members: Sequence[ModuleCost], kind: str = "") -> ModuleCost:
    """Return the cost of several modules together."""
    numbers = ("num_params", "param_bytes", "saved_bytes", "forward_flops", "backward_flops", "num_ops")
    sums: dict[str, Any] = {name: sum(getattr(member, name) for member in members) for name in numbers}
    for name in ("forward_s", "backward_s"):
        known = [seconds for member in members if (seconds := getattr(member, name)) is not None]
        sums[name] = sum(known) if known else None
    alive: Counter[str] = Counter()
    for member in members:
        alive.update(member.at_peak_bytes)
    return ModuleCost(path=label, type=kind or members[0].type, at_peak_bytes=dict(alive), **sums)
