"""Holds which levels of several units no other choice of levels beats, in bytes, seconds of reruns and seconds of transfers.

Units are added one by one. Bytes and seconds add up. The seconds of transfers that nothing hides do not, since transfers go on
beside all that a stage computes, so they are carried along until a stage is whole (`Beside`). With transfers there are more choices
than can be kept: one that is found for a stage is improved by moving a few units at a time to other levels (`improved`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_POINTS = 512
"""The most choices that are kept where nothing is moved."""
MAX_CANDIDATES = 2048
"""Where transfers are a third coordinate and there are more choices, one is kept of those that are alike."""
_CELLS = (24, 48)
"""Alike are those in one cell of a grid of this many steps in transfers and in bytes."""
_EQUAL = 1e-12
"""The share by which sums of equal terms may differ with their order."""


@dataclass(frozen=True)
class Level:
    """One choice of what a unit keeps on the device for each micro-batch, and what it takes instead."""

    kept_bytes: float
    rerun_s: float = 0.0
    """The seconds of the reruns in its backward."""
    rederived_bytes: float = 0.0
    """The bytes held beside the kept ones while the unit's backward runs."""
    out_s: float = 0.0
    """The seconds in which what leaves the device is written, beside the forward."""
    back_s: float = 0.0
    """The seconds in which it is read, beside the backward."""
    largest_bytes: float = 0.0
    """The bytes of the largest tensor that leaves."""
    away_bytes: float = 0.0
    """The bytes of all that leaves."""

    @property
    def moved_s(self) -> float:
        """Return the seconds of the transfers in both directions."""
        return self.out_s + self.back_s


@dataclass(frozen=True)
class Beside:
    """The computation of a stage for a micro-batch, beside which its transfers go on."""

    forward_s: float
    backward_s: float
    overlap: float
    """The share of a transfer that computation hides."""

    def extra_s(self, rerun_s: Any, out_s: Any, back_s: Any) -> Any:
        """Return the seconds beyond forward and backward: reruns, and what of the transfers is not hidden.

        >>> round(float(Beside(1.0, 2.0, 1.0).extra_s(0.5, 1.2, 2.4)), 9)   # of the transfers out 0.2 show, of those back none
        0.7
        """
        extra = rerun_s + out_s - self.overlap * np.minimum(out_s, self.forward_s)
        return extra + back_s - self.overlap * np.minimum(back_s, self.backward_s + rerun_s)


Key = tuple[int, int]
"""The kind of a unit, and the number of its micro-batches in flight."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Choices of levels for some units, as columns of numbers."""

    num_bytes: np.ndarray
    away_bytes: np.ndarray
    """The bytes that are off the device, of all micro-batches in flight."""
    rerun_s: np.ndarray
    out_s: np.ndarray
    back_s: np.ndarray
    key: Key = (-1, 0)
    """That of the last unit."""
    level: np.ndarray | None = None
    """The last unit's level in each choice."""
    place: np.ndarray | None = None
    """The choice for the units before it, in `before`."""
    before: Frontier | None = None

    @classmethod
    def of_no_units(cls) -> Frontier:
        """Return the one choice that there is for no units."""
        none = np.zeros(1)
        return cls(none, none, none, none, none)

    def with_unit(self, key: Key, levels: Sequence[Level]) -> Frontier:
        """Return the choices for one unit more."""
        before = (self.num_bytes, self.away_bytes, self.rerun_s, self.out_s, self.back_s)
        columns = [(own[:, None] + more).ravel() for own, more in zip(before, _columns(key, levels))]
        place, level = (each.ravel() for each in np.indices((len(self.num_bytes), len(levels))))
        best = _best(columns[0], columns[2], columns[3] + columns[4], level, place)
        kept, away, rerun, out, back = (column[best] for column in columns)
        return Frontier(kept, away, rerun, out, back, key, level[best], place[best], self)

    def levels(self, row: int) -> list[tuple[Key, int]]:
        """Return the key and the level of every unit in one choice."""
        found, here = [], self
        while here.before is not None:
            assert here.level is not None
            assert here.place is not None
            found.append((here.key, int(here.level[row])))
            row, here = int(here.place[row]), here.before
        return found


def _columns(key: Key, levels: Sequence[Level]) -> np.ndarray:
    """Return what a unit adds at each level: rows of bytes kept and away, and of seconds of reruns and transfers out and back."""
    return np.array(
        [(key[1] * each.kept_bytes, key[1] * each.away_bytes, each.rerun_s, each.out_s, each.back_s) for each in levels]
    ).T


def _best(
    num_bytes: np.ndarray, rerun_s: np.ndarray, moved_s: np.ndarray, level: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """Return the choices that no other beats, fewest bytes first; if there are many, an even selection of them."""
    if not moved_s.any():
        order = np.lexsort((place, level, rerun_s, num_bytes))
        least = np.minimum.accumulate(np.concatenate(([np.inf], rerun_s[order])))[:-1]
        found = order[rerun_s[order] < least]
        if len(found) <= MAX_POINTS:
            return found
        return found[np.round(np.arange(MAX_POINTS) * ((len(found) - 1) / (MAX_POINTS - 1))).astype(int)]
    rows = np.arange(len(num_bytes))
    if len(rows) > MAX_CANDIDATES:
        rows = _one_of_each_cell(num_bytes, rerun_s, moved_s)
    order = rows[np.lexsort((level[rows], moved_s[rows], rerun_s[rows], num_bytes[rows]))]
    return order[_are_unbeaten(rerun_s[order], moved_s[order])]


def _one_of_each_cell(num_bytes: np.ndarray, rerun_s: np.ndarray, moved_s: np.ndarray) -> np.ndarray:
    """Return the choice with the least reruns of each cell, and that of least bytes of each step of transfers."""
    steps = []
    for column, num in ((moved_s, _CELLS[0]), (num_bytes, _CELLS[1])):
        low, high = column.min(), column.max()
        scaled = (column - low) / (high - low) if high > low else np.zeros(len(column))
        steps.append(np.minimum((scaled * num).astype(int), num - 1))
    of_moved, of_bytes = steps
    least = _first_of_each(of_moved * _CELLS[1] + of_bytes, (rerun_s, num_bytes, moved_s))
    smallest = _first_of_each(of_moved, (num_bytes, rerun_s, moved_s))
    return np.union1d(least, smallest)


def _first_of_each(cell: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
    """Return the first row of each cell, in the order of `keys`, then of rows: each key's least in a pass, not a sort of all."""
    rows = np.arange(len(cell))
    for key in keys:
        least = np.full(cell.max() + 1, np.inf)
        np.minimum.at(least, cell[rows], key[rows])
        rows = rows[key[rows] == least[cell[rows]]]
    first = np.empty(cell.max() + 1, dtype=int)
    first[cell[rows[::-1]]] = rows[::-1]  # of rows that write to one place, the last write stays
    return first[cell[rows]]


def _are_unbeaten(rerun_s: np.ndarray, moved_s: np.ndarray) -> np.ndarray:
    """Return, for rows in the order of their bytes, whether no earlier row takes as little of both seconds."""
    found = np.zeros(len(rerun_s), dtype=bool)
    reruns: list[float] = []
    moves: list[float] = []
    """The unbeaten pairs so far: reruns rise, transfers fall."""
    for row, (rerun, moved) in enumerate(zip(rerun_s.tolist(), moved_s.tolist())):
        at = bisect.bisect_right(reruns, rerun * (1 + _EQUAL))
        if at and moves[at - 1] <= moved * (1 + _EQUAL):
            continue
        found[row] = True
        stop = at
        while stop < len(moves) and moves[stop] >= moved:
            stop += 1
        reruns[at:stop], moves[at:stop] = [rerun], [moved]
    return found


_AMOUNTS = (1, 2, 4)
"""The numbers of units that are moved at a time from a level to another."""
_LESS = 1e-12
"""The least share by which a move has to make a stage faster."""


def improved(
    chosen: Sequence[tuple[Key, int]],
    levels: Mapping[Key, Sequence[Level]],
    last: Level,
    most: tuple[float, float],
    beside: Beside,
) -> list[tuple[Key, int]]:
    """Return levels of units that hold at most so many bytes, and have at most so many away, and take no longer than those given.

    One or two moves of some units to other levels are made at a time, as long as that makes the stage faster. last: the level of
    one more unit, which stays, and whose bytes are not among `most`.
    """
    if not chosen:
        return []
    known = [(key, at) for key in sorted({key for key, _ in chosen}) for at in range(len(levels[key]))]
    counts = np.array([Counter(chosen)[entry] for entry in known])
    sizes = np.concatenate([_columns(key, levels[key]).T for key in sorted({key for key, _ in chosen})])
    moves = np.array(
        [
            (a, b, num)
            for a, one in enumerate(known)
            for b, other in enumerate(known)
            for num in _AMOUNTS
            if a != b and one[0] == other[0] and num <= len(chosen)
        ],
        dtype=int,
    ).reshape(-1, 3)
    by = (sizes[moves[:, 1]] - sizes[moves[:, 0]]) * moves[:, 2:]
    more = np.array([0.0, 0.0, last.rerun_s, last.out_s, last.back_s])
    while len(moves):
        (can,) = np.nonzero(counts[moves[:, 0]] >= moves[:, 2])
        first, second = (each.ravel() for each in np.meshgrid(can, can, indexing="ij"))
        once = first == second  # stands for a move by itself
        taken = moves[first, 2] + moves[second, 2] * ((moves[first, 0] == moves[second, 0]) & ~once)
        after = counts @ sizes + more + by[first] + by[second] * ~once[:, None]
        is_possible = (after[:, 0] <= most[0]) & (after[:, 1] <= most[1]) & (taken <= counts[moves[first, 0]])
        seconds = np.where(is_possible, beside.extra_s(*after[:, 2:].T), np.inf)
        best = int(seconds.argmin()) if len(seconds) else -1
        now = beside.extra_s(*(counts @ sizes + more)[2:])
        if best < 0 or seconds[best] >= now * (1 - _LESS):
            break
        for move in {int(first[best]), int(second[best])}:
            a, b, num = moves[move]
            counts[a] -= num
            counts[b] += num
    return [entry for entry, num in zip(known, counts) for _ in range(num)]
