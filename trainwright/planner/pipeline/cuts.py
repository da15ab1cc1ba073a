"""Searches for cuts by moves of single blocks; each cut is judged by a simulation with the least reruns that fit.

The levels of a stage are chosen for that stage alone: a step never gets longer when one of its stages gets shorter, so the
fewest seconds of reruns that fit are optimal for any cuts. The search chooses only the cuts and the depths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...rank.stage_actions import interleaved_in_flight
from .events import least_step_s, one_f_one_b, simulated_step
from .table import Fit, Spans, Table

Cuts = tuple[int, ...]
"""The units at which stages 1 … P-1 begin, in ascending order."""
_EVENT_S, _UNIT_S = 1e-7, 2e-6
"""The work of an action of a simulated step, and of a unit in a floor."""
DEEPER = (0, 1, 2)
"""The numbers of forwards in flight beyond 1F1B's that are tried beside GPipe."""


@dataclass(frozen=True)
class Staged:
    """Stages with cuts, depths and levels chosen, and their simulated step."""

    cuts: Cuts
    in_flight: tuple[int, ...]
    fits: tuple[Fit, ...]
    """The levels of each stage."""
    step_s: float


@dataclass(eq=False)
class Judge:
    """Simulates cuts of one table under one budget, and caches the results."""

    table: Table
    budget_bytes: float
    fixed: Mapping[int, int] = field(default_factory=dict)
    """The units at which stages are pinned to begin, by stage."""
    num_judged: int = 0
    _known: dict[tuple[Cuts, tuple[int, ...]], Staged | None] = field(default_factory=dict, init=False)
    _floors: dict[tuple[Cuts, tuple[int, ...]], float] = field(default_factory=dict, init=False)

    @property
    def work_s(self) -> float:
        """Return the work of all that was judged, counted in actions and units."""
        table = self.table
        actions = 8 * table.num_pieces * table.num_micro_batches
        return _EVENT_S * actions * self.num_judged + _UNIT_S * len(table.units) * len(self._floors)

    def allows(self, cuts: Cuts) -> bool:
        """Tell whether every pinned stage begins at its unit."""
        return all(cuts[stage - 1] == unit for stage, unit in self.fixed.items())

    def judge(self, cuts: Cuts, in_flight: tuple[int, ...], below_s: float = math.inf) -> Staged | None:
        """Return the cuts with the least recomputation that fits, and the simulated step; None if no levels fit.

        below_s: None too where it is proven without events that the step takes no less.
        """
        key = cuts, in_flight
        if key not in self._known:
            fits = self._fitted(cuts, in_flight)
            if fits is None:
                self._known[key] = None
            elif self._floor_s(cuts, in_flight) >= below_s:
                return None
            else:
                self.num_judged += 1
                self._known[key] = Staged(cuts, in_flight, fits, step_s(self.table, cuts, in_flight, fits))
        return self._known[key]

    def _fitted(self, cuts: Cuts, in_flight: tuple[int, ...]) -> tuple[Fit, ...] | None:
        if not self.allows(cuts):
            return None
        fits = []
        for spans, depths in zip(self.table.stages(cuts), self.table.depths(in_flight)):
            fit = self.table.fit(spans, depths, self.budget_bytes)
            if fit is None:
                return None
            fits.append(fit)
        return tuple(fits)

    def _floor_s(self, cuts: Cuts, in_flight: tuple[int, ...]) -> float:
        """Return what the step takes at least, where the cuts fit; the lower, the sooner a move is looked at."""
        key, table = (cuts, in_flight), self.table
        if key not in self._floors:
            fits = self._fitted(cuts, in_flight)
            self._floors[key] = (
                math.inf
                if fits is None
                else least_step_s(table.schedule(in_flight), table.seconds(cuts, fits), overlaps=table.overlaps)
            )
        return self._floors[key]

    def near(self, cuts: Cuts) -> Iterator[Cuts]:
        """Yield the neighbours of `cuts`; if stages have several pieces, only those by a move to an adjacent piece."""
        return neighbours(cuts, len(self.table.units), 1 if self.table.virtual > 1 else len(cuts))

    def moved(self, found: Staged) -> Staged:
        """Return the local optimum reached from `found` by moves of single blocks between stages."""
        while True:
            best = found
            for cuts in sorted(self.near(found.cuts), key=lambda cuts: self._floor_s(cuts, found.in_flight)):
                one = self.judge(cuts, found.in_flight, best.step_s * (1 - 1e-12))
                best = best if one is None else min(best, one, key=_order)
            if best.step_s >= found.step_s * (1 - 1e-12):
                return found
            found = best


def step_s(table: Table, cuts: Cuts, in_flight: tuple[int, ...], fits: Sequence[Fit]) -> float:
    """Return the simulated seconds of a step."""
    schedule, stages = table.schedule(in_flight), table.seconds(cuts, fits)
    return simulated_step(schedule, stages, table.tied(cuts), overlaps=table.overlaps).step_s


def _order(found: Staged) -> tuple[float, Cuts]:
    return found.step_s, found.cuts


def neighbours(cuts: Cuts, num_units: int, furthest: int | None = None) -> Iterator[Cuts]:
    """Yield the cuts with one block moved from a stage to another: all the cuts between the two shift by one.

    furthest: the most cuts that shift together.

    >>> sorted(neighbours((2,), 4)), len(list(neighbours((2, 4), 6)))
    ([(1,), (3,)], 6)
    """
    for first in range(len(cuts)):
        for stop in range(first + 1, min(len(cuts), first + (furthest or len(cuts))) + 1):
            for by in (-1, 1):
                moved = (*cuts[:first], *(at + by for at in cuts[first:stop]), *cuts[stop:])
                if is_possible(moved, num_units):
                    yield moved


def is_possible(cuts: Cuts, num_units: int) -> bool:
    """Tell whether every stage has at least one unit."""
    edges = (0, *cuts, num_units)
    return all(first < stop for first, stop in itertools.pairwise(edges))


def all_cuts(num_units: int, num_stages: int) -> Iterator[Cuts]:
    """Yield every way to cut the units into stages."""
    yield from itertools.combinations(range(1, num_units), num_stages - 1)


def depths(num_stages: int, num_micro_batches: int) -> list[tuple[int, ...]]:
    """Return the depths to try, as numbers of forwards in flight on each stage: 1F1B's, deeper ones, and GPipe's.

    >>> depths(2, 8)
    [(2, 1), (3, 1), (4, 1), (8, 8)]
    """
    found = [one_f_one_b(num_stages, num_micro_batches, more) for more in DEEPER]
    found.append((num_micro_batches,) * num_stages)
    return list(dict.fromkeys(found))


def depths_of(table: Table) -> list[tuple[int, ...]]:
    """Return the depths to try for a table's schedule, the usual ones first."""
    num, num_micro = table.num_stages, table.num_micro_batches
    if table.virtual > 1:
        return [interleaved_in_flight(num, table.virtual, num_micro)]
    if table.splits_backward:
        found = [(min(num_micro, most),) * num for most in (num, 2 * num - 1)]
        return list(dict.fromkeys([*found, one_f_one_b(num, num_micro)]))
    return depths(num, num_micro)


def fastest(judge: Judge, starts: Sequence[Cuts]) -> Staged | None:
    """Return the fastest local optimum reached from `starts`, over all depths; None if nothing was found to fit."""
    table, best = judge.table, None
    for in_flight in depths_of(table):
        begin = [*starts, *([best.cuts] if best is not None else [])]
        known = [one for cuts in dict.fromkeys(begin) if (one := judge.judge(cuts, in_flight)) is not None]
        if not known:
            known = [one for cuts in begin if (one := _repaired(judge, cuts, in_flight)) is not None]
        for one in known:
            found = judge.moved(one)
            if best is None or found.step_s < best.step_s * (1 - 1e-12):
                best = found
    return best


def _repaired(judge: Judge, cuts: Cuts, in_flight: tuple[int, ...]) -> Staged | None:
    """Return cuts near `cuts` that fit, reached by moves that lower the overflow; None if no move lowers it."""
    seen = set()
    while (one := judge.judge(cuts, in_flight)) is None:
        seen.add(cuts)
        near = [other for other in judge.near(cuts) if other not in seen]
        if not near:
            return None
        overs = {other: overflow(judge, other, in_flight) for other in near}
        best = min(near, key=lambda other: (overs[other], other))
        if overs[best] >= overflow(judge, cuts, in_flight):
            return None
        cuts = best
    return one


def overflow(judge: Judge, cuts: Cuts, in_flight: tuple[int, ...]) -> float:
    """Return the sum of the bytes by which stages exceed the budget even if they rematerialise all that they can."""
    total = 0.0
    for spans, depths in zip(judge.table.stages(cuts), judge.table.depths(in_flight)):
        total += max(0.0, least_bytes(judge.table, spans, depths) - judge.budget_bytes)
    return total


def least_bytes(table: Table, spans: Spans, depths: Sequence[int]) -> float:
    """Return the least peak of a stage over all levels, in bytes."""
    units = [(unit, depth) for (first, stop), depth in zip(spans, depths) for unit in table.units[first:stop]]
    kept = sum(depth * min(level.kept_bytes for level in table.levels[unit.kind]) for unit, depth in units[:-1])
    unit, depth = units[-1]
    last = min(depth * level.kept_bytes + level.rederived_bytes for level in table.levels[unit.kind])
    return table.fixed_bytes(spans, depths) + kept + last


def brute_force(judge: Judge) -> Staged | None:
    """Return the fastest stages by looking at all cuts: the oracle of the search, for small tables."""
    table, best = judge.table, None
    for in_flight in depths_of(table):
        for cuts in all_cuts(len(table.units), table.num_pieces):
            found = judge.judge(cuts, in_flight)
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found
    return best


def nothing_fits_bytes(judge: Judge, starts: Sequence[Cuts]) -> tuple[float, int]:
    """Return the least budget that some cuts near `starts` fit, and the stage that binds there."""
    least, stage, _ = _leanest(judge.table, starts)
    return least, stage


def leanest(judge: Judge, starts: Sequence[Cuts]) -> Staged | None:
    """Return the stages near `starts` that hold least by the table, within the budget or not; None where there are no cuts."""
    table = judge.table
    least, _, cuts = _leanest(table, starts)
    return None if math.isinf(least) else replace(judge, budget_bytes=least).judge(cuts, depths_of(table)[0])


def _leanest(table: Table, starts: Sequence[Cuts]) -> tuple[float, int, Cuts]:
    best: tuple[float, int, Cuts] = (math.inf, 0, ())
    for in_flight in depths_of(table)[:1]:
        for cuts in starts:
            while True:
                own = (*_fullest(table, cuts, in_flight), cuts)
                near = [(*_fullest(table, other, in_flight), other) for other in neighbours(cuts, len(table.units))]
                best = min(best, own)
                nearer = min(near, default=None)
                if nearer is None or nearer[0] >= own[0]:
                    break
                cuts = nearer[2]
    return best


def _fullest(table: Table, cuts: Cuts, in_flight: tuple[int, ...]) -> tuple[float, int]:
    rows = [least_bytes(table, *stage) for stage in zip(table.stages(cuts), table.depths(in_flight))]
    return max(rows), rows.index(max(rows))
