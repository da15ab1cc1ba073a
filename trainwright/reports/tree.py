"""The modules of a profile as a tree in which blocks that cost the same are one row."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..artifacts import ModuleCost


@dataclass(frozen=True)
class ModuleRow:
    """A module, or `count` modules that cost the same; `cost` is their sum."""

    label: str
    level: int
    """The root is 0; the number of a block is no level of its own."""
    count: int
    cost: ModuleCost

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
    rows = [ModuleRow(label, _level(label), len(members), _sum(label, members)) for label, members in grouped.items()]
    rows = [row for row, following in zip(rows, [*rows[1:], None]) if not _is_repeated(row, following)]
    return [row for row in rows if depth is None or row.level <= depth]


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
    own = {module.path: tuple(module.model_dump(exclude={"path"}).values()) for module in modules}
    below: dict[str, list[tuple[str, object]]] = defaultdict(list)
    for path, costs in own.items():
        parts = path.split(".") if path else []
        for level in range(len(parts)):
            below[".".join(parts[:level])].append((".".join(parts[level:]), costs))
    return {path: (*costs, tuple(below[path])) for path, costs in own.items()}


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
    same = following.cost.model_dump(exclude={"path", "type"}) == row.cost.model_dump(exclude={"path", "type"})
    return same and _is_number(following.label.rpartition(".")[2])


def _is_number(part: str) -> bool:
    return re.fullmatch(r"\d+|\{\d+-\d+\}", part) is not None


def _level(label: str) -> int:
    """How deep a module is; the number of a block counts where nothing else names the blocks."""
    parts = label.split(".") if label else []
    return sum(place == 0 or not _is_number(part) for place, part in enumerate(parts))


def _sum(label: str, members: list[ModuleCost]) -> ModuleCost:
    numbers = ("num_params", "param_bytes", "saved_bytes", "forward_flops", "backward_flops", "num_ops")
    sums = {name: sum(getattr(member, name) for member in members) for name in numbers}
    return ModuleCost(path=label, type=members[0].type, **sums)
