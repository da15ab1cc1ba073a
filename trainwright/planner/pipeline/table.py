"""The seconds and bytes of what may be cut, and the least recomputation with which a run of it fits a budget.

A *unit* is what lies between two neighbouring boundaries: a block, with what stands before the first or behind the last.
Units of one kind have the same *levels*: what a unit keeps for each micro-batch that is in flight, and what its backward
reruns for that. A stage is a run of units; with w micro-batches in flight it holds

    static + w · (Σ kept + given) + arriving and leaving + working set + what the last unit rederives

`Table.fit` chooses the levels of a stage: the fewest seconds of reruns whose bytes are within the budget.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .events import StageSeconds, Tied

MAX_POINTS = 512
"""The most ways to trade bytes for seconds that are told apart for one run of units."""


@dataclass(frozen=True)
class Level:
    """The bytes that a unit keeps of one micro-batch, and the seconds that its backward reruns in return."""

    kept_bytes: float
    rerun_s: float = 0.0
    rederived_bytes: float = 0.0
    """The bytes held beside the kept ones while the unit's backward runs."""


@dataclass(frozen=True)
class Unit:
    """The ops between two neighbouring boundaries. Seconds are of one micro-batch, without recompute."""

    begins: str
    """The name of the boundary at its beginning; empty for the first."""
    kind: int
    forward_s: float
    backward_s: float
    params: tuple[str, ...] = ()
    begin_s: float = 0.0
    reduce_s: float = 0.0
    other_bytes: float = 0.0
    """Buffers."""
    work_bytes: float = 0.0
    """The most that one of its ops holds for a moment."""
    given_bytes: float = 0.0
    """The bytes that cross the boundary at its beginning, for a micro-batch."""
    returned_bytes: float = 0.0
    """The bytes of the gradients that cross the same boundary back."""


@dataclass(frozen=True)
class Param:
    """A parameter of one rank: itself with gradient and optimizer state, and the seconds of its update."""

    held_bytes: float
    update_s: float
    grad_bytes: float = 0.0


@dataclass(frozen=True)
class Hop:
    """The link from one stage to the next."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True)
class Fit:
    """A stage with its levels chosen."""

    levels: tuple[int, ...]
    """One a unit."""
    rerun_s: float
    peak_bytes: float


@dataclass(frozen=True)
class _Point:
    num_bytes: float
    seconds: float
    counts: tuple[tuple[int, int, int], ...]
    """(kind, level, how many units)."""


@dataclass(eq=False)
class Table:
    """The units that cuts divide into stages, under one choice of layouts."""

    units: tuple[Unit, ...]
    levels: tuple[tuple[Level, ...], ...]
    """By kind: the first keeps everything."""
    params: dict[str, Param]
    hops: tuple[Hop, ...]
    num_micro_batches: int
    overlaps: bool = True
    """True if transfers overlap computation."""
    excess_bytes: dict[tuple[bool, bool], float] = field(default_factory=dict)
    """The bytes that simulations found above the estimate, by whether a stage holds the first unit and the last one."""
    _fits: dict[tuple[int, int, int, float], Fit | None] = field(default_factory=dict)
    _frontiers: dict[tuple[tuple[int, int], ...], list[_Point]] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return len(self.hops) + 1

    @cached_property
    def tied_params(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several units read, with those units."""
        readers: dict[str, list[int]] = {}
        for at, unit in enumerate(self.units):
            for name in unit.params:
                readers.setdefault(name, []).append(at)
        return {name: tuple(at) for name, at in readers.items() if len(at) > 1}

    def spans(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the units (first, one behind the last) of each stage, where stages 1 … P-1 begin at the units `cuts`."""
        edges = [0, *cuts, len(self.units)]
        return list(itertools.pairwise(edges))

    def params_of(self, first: int, stop: int) -> set[str]:
        """Return the parameters that a stage holds."""
        return {name for unit in self.units[first:stop] for name in unit.params}

    # Bytes

    def fixed_bytes(self, first: int, stop: int, in_flight: int) -> float:
        """Return what a stage holds whatever it recomputes."""
        own = self.units[first:stop]
        static = sum(self.params[name].held_bytes for name in self.params_of(first, stop))
        static += sum(unit.other_bytes for unit in own)
        given, handed = own[0].given_bytes, self.units[stop].given_bytes if stop < len(self.units) else 0.0
        returned = self.units[stop].returned_bytes if stop < len(self.units) else 0.0
        crossing = (in_flight + (1 if first else 0)) * given + own[0].returned_bytes + handed + returned
        return static + crossing + max(unit.work_bytes for unit in own) + self._excess(first, stop)

    def _excess(self, first: int, stop: int) -> float:
        return self.excess_bytes.get((first == 0, stop == len(self.units)), 0.0)

    def learn(self, first: int, stop: int, num_bytes: float) -> None:
        """Note by how many bytes more than its estimate a stage was found to hold."""
        ends = first == 0, stop == len(self.units)
        self.excess_bytes[ends] = self.excess_bytes.get(ends, 0.0) + num_bytes
        self._fits.clear()

    def peak_bytes(self, first: int, stop: int, in_flight: int, levels: Sequence[int]) -> float:
        """Return the estimated peak of a stage."""
        chosen = [self.levels[unit.kind][level] for unit, level in zip(self.units[first:stop], levels)]
        kept = sum(level.kept_bytes for level in chosen)
        return self.fixed_bytes(first, stop, in_flight) + in_flight * kept + chosen[-1].rederived_bytes

    def fit(self, first: int, stop: int, in_flight: int, budget_bytes: float) -> Fit | None:
        """Return the levels with the fewest seconds of reruns within the budget; None where not even the leanest fit."""
        key = first, stop, in_flight, budget_bytes
        if key not in self._fits:
            self._fits[key] = self._fitted(first, stop, in_flight, budget_bytes)
        return self._fits[key]

    def _fitted(self, first: int, stop: int, in_flight: int, budget_bytes: float) -> Fit | None:
        fixed, last = self.fixed_bytes(first, stop, in_flight), self.units[stop - 1].kind
        kinds = Counter(unit.kind for unit in self.units[first : stop - 1])
        rest = self._frontier(tuple(sorted(kinds.items())))
        best: tuple[float, float, int, _Point] | None = None
        for number, level in enumerate(self.levels[last]):
            room = (budget_bytes - fixed - level.rederived_bytes) / in_flight - level.kept_bytes
            at = bisect.bisect_right(rest, room, key=lambda point: point.num_bytes) - 1
            if at >= 0:
                kept = rest[at].num_bytes + level.kept_bytes
                peak = fixed + in_flight * kept + level.rederived_bytes
                found = (rest[at].seconds + level.rerun_s, peak, number, rest[at])
                best = found if best is None or found[:2] < best[:2] else best
        return None if best is None else Fit(self._levels_of(first, stop, best[2], best[3]), best[0], best[1])

    def _levels_of(self, first: int, stop: int, last: int, point: _Point) -> tuple[int, ...]:
        """Hand the counted levels out, the most recomputed first: their backward comes last, when others are gone."""
        left: dict[int, list[int]] = {}
        for kind, level, num in sorted(point.counts, reverse=True):
            left.setdefault(kind, []).extend([level] * num)
        queues = {kind: iter(levels) for kind, levels in left.items()}
        return (*(next(queues[unit.kind]) for unit in self.units[first : stop - 1]), last)

    def _frontier(self, kinds: tuple[tuple[int, int], ...]) -> list[_Point]:
        """Return the best ways to trade bytes for seconds of so many units of each kind, the fewest bytes first."""
        if not kinds:
            return [_Point(0.0, 0.0, ())]
        if kinds not in self._frontiers:
            (kind, num), others = kinds[-1], kinds[:-1]
            fewer = self._frontier((*others, (kind, num - 1)) if num > 1 else others)
            found = [
                _Point(
                    point.num_bytes + level.kept_bytes, point.seconds + level.rerun_s, _more(point.counts, kind, number)
                )
                for point in fewer
                for number, level in enumerate(self.levels[kind])
            ]
            self._frontiers[kinds] = _best(found)
        return self._frontiers[kinds]

    # Seconds

    def seconds(self, cuts: Sequence[int], fits: Sequence[Fit]) -> list[StageSeconds]:
        """Return what each stage takes."""
        found = []
        for stage, ((first, stop), fit) in enumerate(zip(self.spans(cuts), fits)):
            own, is_last = self.units[first:stop], stop == len(self.units)
            behind = None if is_last else self.units[stop]
            found.append(
                StageSeconds(
                    forward_s=sum(unit.forward_s for unit in own),
                    backward_s=sum(unit.backward_s for unit in own) + fit.rerun_s,
                    begin_s=max(unit.begin_s for unit in own),
                    reduce_s=sum(unit.reduce_s for unit in own),
                    update_s=sum(self.params[name].update_s for name in sorted(self.params_of(first, stop))),
                    hand_s=0.0 if behind is None else self.hops[stage].seconds(behind.given_bytes),
                    return_s=0.0 if behind is None else self.hops[stage].seconds(behind.returned_bytes),
                )
            )
        return found

    def tied(self, cuts: Sequence[int]) -> list[Tied]:
        """Return the sums over stages of tied parameters' gradients: one for all parameters of the same stages."""
        return tied_sums(
            {
                name: tuple(sorted({self.stage_at(cuts, at) for at in units}))
                for name, units in self.tied_params.items()
            },
            {name: self.params[name].grad_bytes for name in self.tied_params},
            self.hops,
        )

    @staticmethod
    def stage_at(cuts: Sequence[int], unit: int) -> int:
        """Return the stage that runs a unit."""
        return bisect.bisect_right(list(cuts), unit)


def tied_sums(stages: dict[str, tuple[int, ...]], grad_bytes: dict[str, float], hops: Sequence[Hop]) -> list[Tied]:
    """Return, for each set of stages that share parameters, the seconds of the sums of their gradients.

    Each parameter's is an all-reduce over the n stages that hold it, as in `hardware.collectives`: 2 (n − 1) α + 2 (n − 1)/n · B/β
    on the slowest link between them.
    """
    found: dict[tuple[int, ...], float] = {}
    for name, at in sorted(stages.items()):
        if len(at) > 1:
            between = hops[at[0] : at[-1]]
            latency, rate = max(hop.latency_s for hop in between), min(hop.bytes_per_s for hop in between)
            num = len(at)
            taken = 2 * (num - 1) * (latency + grad_bytes[name] / num / rate)
            found[at] = found.get(at, 0.0) + taken
    return [Tied(at, seconds) for at, seconds in sorted(found.items())]


def _more(counts: tuple[tuple[int, int, int], ...], kind: int, level: int) -> tuple[tuple[int, int, int], ...]:
    """Return the counts with one unit more."""
    found = {(a, b): num for a, b, num in counts}
    found[kind, level] = found.get((kind, level), 0) + 1
    return tuple((a, b, num) for (a, b), num in sorted(found.items()))


def _best(points: list[_Point]) -> list[_Point]:
    """Return the points that no other has fewer bytes and fewer seconds than; where they are many, evenly thinned."""
    found: list[_Point] = []
    for point in sorted(points, key=lambda point: (point.num_bytes, point.seconds, point.counts)):
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    if len(found) <= MAX_POINTS:
        return found
    step = (len(found) - 1) / (MAX_POINTS - 1)
    return [found[round(k * step)] for k in range(MAX_POINTS)]
