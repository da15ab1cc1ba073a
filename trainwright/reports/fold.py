"""A tree of modules cut down to what matters: sorted, and what is small in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..artifacts import ModuleCost, UserError
from .measures import MEASURES, SORTABLE
from .tree import ModuleRow, children_of, sum_of

MIN_SHARE = 0.01
"""Of the whole; what has less of everything is folded."""


def folded_rows(rows: Sequence[ModuleRow], sort: str | None = None, min_share: float = MIN_SHARE) -> list[ModuleRow]:
    """Return the rows with siblings sorted by `sort`, and those of less than `min_share` of the whole made one.

    sort: memory, time, flops or params, the largest first; only that measure then says what is small. None keeps the
    order, and what is small is small in all of them. Raises `UserError` for another name, and where no module has
    anything of the measure.
    """
    below = children_of(rows)
    wholes = {name: sum(MEASURES[name].read(row.cost) for row in below[None]) for name in SORTABLE}
    _check_sort(sort, wholes)
    names = SORTABLE if sort is None else (sort,)

    def share(row: ModuleRow) -> float:
        return max(MEASURES[name].read(row.cost) / wholes[name] for name in names if wholes[name])

    def arranged(siblings: list[ModuleRow]) -> list[ModuleRow]:
        if sort is not None:
            siblings = sorted(siblings, key=lambda row: -MEASURES[sort].read(row.cost))
        small = [row for row in siblings if any(wholes[name] for name in names) and share(row) < min_share]
        small = small if sum(map(hidden, small)) > 1 else []
        labels = {row.label for row in small}
        kept = [each for row in siblings if row.label not in labels for each in (row, *arranged(below[row.label]))]
        return [*kept, _together(small, sum(map(hidden, small)))] if small else kept

    def hidden(row: ModuleRow) -> int:
        return 1 + sum(map(hidden, below[row.label]))

    return arranged(below[None])


def _check_sort(sort: str | None, wholes: dict[str, float]) -> None:
    if sort is None:
        return
    if sort not in SORTABLE:
        raise UserError(f"modules are sorted by {', '.join(SORTABLE)}; got {sort!r}; choose one of them")
    if wholes[sort]:
        return
    advice = {"time": "add --hardware", "memory": "make the profile again"}.get(sort, "sort by something else")
    raise UserError(f"sorting by {sort} needs a profile with {MEASURES[sort].label}; this one has none; {advice}")


def _together(small: list[ModuleRow], num_rows: int) -> ModuleRow:
    """One row for several siblings and all below them."""
    cost: ModuleCost = sum_of("", [row.cost for row in small], kind=" ")
    return replace(small[0], label=f"({num_rows} smaller)", count=1, cost=cost, num_folded=num_rows)
