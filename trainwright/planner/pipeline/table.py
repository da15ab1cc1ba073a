"""Holds the seconds and bytes of the units between cuts, and finds the fewest seconds with which a stage fits a budget.

A *unit* is the part of the program between two neighbouring boundaries: a block; the first and last units also have what stands
before and after all blocks. Units of one kind have the same *levels*: each one says what a unit keeps for each micro-batch in
flight, and what its backward reruns, or brings back to the device, instead. A stage is consecutive units; with w micro-batches in
flight it holds

    static + w · (Σ kept + given) + transfers in flight + working set + what the last unit reruns or has come back

`Table.fit` chooses the levels of a stage. Of those whose bytes are within the budget they add the fewest seconds to a
micro-batch: what they rerun, and what of the transfers the computation beside them does not hide, as plans without stages count
it. With reruns r, transfers o out and i back, forwards f and backwards b, all summed over the stage's units,

    r + (o - ω min(o, f)) + (i - ω min(i, b + r))          ω: the share of a transfer that computation hides (`Tier.overlap`)
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ...artifacts import Tier
from ...rank.stage_actions import Schedule, most_in_flight
from .events import StageSeconds, Tied
from .frontier import Beside, Frontier, Key, Level, improved

Spans = tuple[tuple[int, int], ...]
"""The units of each piece of a stage, as (first, one past the last)."""


@dataclass(frozen=True)
class Unit:
    """The ops between two neighbouring boundaries; its seconds are those of one micro-batch, without reruns."""

    begins: str
    """The name of the boundary at its beginning; empty for the first."""
    kind: int
    forward_s: float
    backward_s: float
    params: tuple[str, ...] = ()
    begin_s: float = 0.0
    reduce_s: float = 0.0
    other_bytes: float = 0.0
    """The bytes of buffers."""
    work_bytes: float = 0.0
    """The largest working set of its groups."""
    given_bytes: float = 0.0
    """The bytes that cross the boundary at its beginning, for a micro-batch."""
    returned_bytes: float = 0.0
    """The bytes of the gradients that cross the same boundary back."""
    weight_s: float = 0.0
    """The part of `backward_s` that computes weight gradients which may be postponed."""


@dataclass(frozen=True)
class Param:
    """One rank's part of a parameter: its bytes with gradient and optimizer state, and the seconds of its update."""

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


def hop_behind(hops: Sequence[Hop], piece: int) -> Hop:
    """Return the link from a piece to the next; from the last stage back to the first, the slowest of the links."""
    stage = piece % (len(hops) + 1)
    if stage < len(hops):
        return hops[stage]
    return max(hops, key=lambda hop: (hop.latency_s, 1 / hop.bytes_per_s))


@dataclass(frozen=True)
class Fit:
    """The levels chosen for a stage, with what they take of a micro-batch, and its estimated peak."""

    levels: tuple[int, ...]
    """The level of each unit."""
    rerun_s: float
    peak_bytes: float
    extra_s: float = 0.0
    """The seconds of its reruns, and what of its transfers shows."""


@dataclass(frozen=True)
class _Choice:
    """One choice of levels for a stage and what it takes: the last unit's level, and a row of the other units' frontier."""

    extra_s: float
    """The seconds of a micro-batch beyond its forward and backward: reruns, and what of the transfers shows."""
    moved_s: float
    """The seconds of all transfers: of choices that take as long, the one that moves least is wanted."""
    num_bytes: float
    rerun_s: float
    level: int
    rest: Frontier
    row: int


@dataclass(eq=False)
class Table:
    """The units that cuts divide into stages, measured under one choice of layouts."""

    units: tuple[Unit, ...]
    levels: tuple[tuple[Level, ...], ...]
    """The levels of each kind; the first one keeps everything."""
    params: dict[str, Param]
    hops: tuple[Hop, ...]
    num_micro_batches: int
    overlaps: bool = True
    """True if transfers overlap with computation."""
    excess_bytes: dict[tuple[bool, bool], float] = field(default_factory=dict)
    """The bytes by which simulated peaks exceed the estimate, by whether a stage has the first unit, and the last one."""
    virtual: int = 1
    """The pieces of each stage."""
    splits_backward: bool = False
    tier: Tier | None = None
    """Where units may offload to; None if their levels move nothing."""
    _fits: dict[tuple[Spans, Sequence[int], float], Fit | None] = field(default_factory=dict)
    _extras: dict[tuple[Spans, Sequence[int], float], float] = field(default_factory=dict, init=False)
    _frontiers: dict[tuple[tuple[Key, int], ...], Frontier] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Tell whether each stage has one piece and the backward is not split."""
        return self.virtual == 1 and not self.splits_backward

    @property
    def num_pieces(self) -> int:
        return len(self.hops) + 1

    @property
    def num_stages(self) -> int:
        return self.num_pieces // self.virtual

    def scheduled(self, virtual: int = 1, splits_backward: bool = False) -> Table:
        """Return a table of the same units with `virtual` pieces a stage, or a split backward, that has learned no excess yet.

        The link from the last stage back to the first is taken to be the slowest of the links.
        """
        hops = tuple(hop_behind(self.hops, piece) for piece in range(virtual * self.num_stages - 1))
        # frontiers are of levels alone, and stay
        return replace(self, hops=hops, virtual=virtual, splits_backward=splits_backward, excess_bytes={}, _fits={})

    def exceeding(self, excess_bytes: dict[tuple[bool, bool], float]) -> Table:
        """Return a table of the same units that has learned this excess."""
        return replace(self, excess_bytes=excess_bytes, _fits={})

    @property
    def order(self) -> tuple[int, bool]:
        """Return in which order stages work, but for the depth: pieces a stage, and whether the backward is split."""
        return self.virtual, self.splits_backward

    def schedule(self, in_flight: Sequence[int]) -> Schedule:
        return Schedule(self.num_micro_batches, tuple(in_flight), self.virtual, self.splits_backward)

    def stages(self, cuts: Sequence[int]) -> list[Spans]:
        """Return the units of each stage, piece by piece."""
        spans = self.spans(cuts)
        return [tuple(spans[stage :: self.num_stages]) for stage in range(self.num_stages)]

    def depths(self, in_flight: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the most forwards in flight, by stage and piece."""
        return most_in_flight(self.schedule(in_flight)) if self.virtual > 1 else [(depth,) for depth in in_flight]

    @cached_property
    def tied_params(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that several units read, with those units."""
        readers: dict[str, list[int]] = {}
        for at, unit in enumerate(self.units):
            for name in unit.params:
                readers.setdefault(name, []).append(at)
        return {name: tuple(at) for name, at in readers.items() if len(at) > 1}

    def spans(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the units of each piece as (first, one past the last), if pieces after the first begin at the units `cuts`."""
        edges = [0, *cuts, len(self.units)]
        return list(itertools.pairwise(edges))

    def params_of(self, spans: Spans) -> set[str]:
        """Return the parameters that a stage holds."""
        return {name for first, stop in spans for unit in self.units[first:stop] for name in unit.params}

    # Bytes

    def fixed_bytes(self, spans: Spans, depths: Sequence[int]) -> float:
        """Return the bytes that a stage holds at any levels."""
        static, crossing, work = self.held_bytes(spans), 0.0, 0.0
        for (first, stop), depth in zip(spans, depths):
            own, behind = self.units[first:stop], self.units[stop] if stop < len(self.units) else None
            for unit in own:
                static += unit.other_bytes
                work = max(work, unit.work_bytes)
            crossing += (depth + (1 if first else 0)) * own[0].given_bytes + own[0].returned_bytes
            crossing += 0.0 if behind is None else behind.given_bytes + behind.returned_bytes
        return static + crossing + work + self.excess_bytes.get(self.ends(spans), 0.0)

    def held_bytes(self, spans: Spans) -> float:
        """Return what a stage's parameters take, with their gradients and optimizer states."""
        held = sum(self._alone_bytes[stop] - self._alone_bytes[first] for first, stop in spans)
        return held + sum(
            self.params[name].held_bytes
            for name, readers in self.tied_params.items()
            if any(first <= at < stop for first, stop in spans for at in readers)
        )

    @cached_property
    def _alone_bytes(self) -> list[float]:
        """Return, for each unit and the end, what the parameters take that one unit alone reads, of all units before it."""
        tied = self.tied_params
        own = (sum(self.params[name].held_bytes for name in unit.params if name not in tied) for unit in self.units)
        return list(itertools.accumulate(own, initial=0.0))

    def ends(self, spans: Spans) -> tuple[bool, bool]:
        """Return whether a stage has the first unit, and whether it has the last one."""
        return spans[0][0] == 0, spans[-1][1] == len(self.units)

    def learn(self, spans: Spans, num_bytes: float) -> None:
        """Add the excess of a simulated peak over its estimate, for all stages with the same ends."""
        ends = self.ends(spans)
        self.excess_bytes[ends] = self.excess_bytes.get(ends, 0.0) + num_bytes
        self._fits.clear()
        self._extras.clear()

    def peak_bytes(self, spans: Spans, depths: Sequence[int], levels: Sequence[int]) -> float:
        """Return the estimated peak of a stage with the given levels of its units, piece by piece."""
        chosen = [self.levels[unit.kind][level] for unit, level in zip(self._own(spans), levels)]
        weights = [depth for (first, stop), depth in zip(spans, depths) for _ in range(first, stop)]
        kept = sum(depth * level.kept_bytes for level, depth in zip(chosen, weights))
        return self.fixed_bytes(spans, depths) + kept + chosen[-1].rederived_bytes

    def _own(self, spans: Spans) -> list[Unit]:
        return [unit for first, stop in spans for unit in self.units[first:stop]]

    def fit(self, spans: Spans, depths: Sequence[int], budget_bytes: float) -> Fit | None:
        """Return the levels that take the fewest seconds within the budget; None if no levels fit.

        depths: the number of forwards in flight for each piece of the stage.
        """
        key = spans, tuple(depths), budget_bytes
        if key not in self._fits:
            self._fits[key] = self._fitted(spans, depths, budget_bytes)
        return self._fits[key]

    def _fitted(self, spans: Spans, depths: Sequence[int], budget_bytes: float) -> Fit | None:
        found = self._least(spans, depths, budget_bytes)
        if found is None:
            return None
        scale = _one_depth(depths)
        weights = [depth // scale for (first, stop), depth in zip(spans, depths) for _ in range(first, stop)]
        own, rest = self._own(spans), found.rest.levels(found.row)
        if self.tier is None:
            levels = self._levels_of(own, weights, found.level, rest)
            return Fit(levels, found.rerun_s, found.num_bytes, found.extra_s)
        last = self.levels[own[-1].kind][found.level]
        least = self.fixed_bytes(spans, depths) + depths[-1] * last.kept_bytes + last.rederived_bytes
        by_key = {key: self.levels[key[0]] for key, _ in rest}
        most = (budget_bytes - least) / scale, self._most_away(last, depths[-1]) / scale
        rest = improved(rest, by_key, last, most, self._beside(spans, self.tier))
        return self._fit_of(spans, depths, self._levels_of(own, weights, found.level, rest), self.tier)

    def _fit_of(self, spans: Spans, depths: Sequence[int], levels: tuple[int, ...], tier: Tier) -> Fit:
        """Return what a stage takes with the given levels."""
        chosen = [self.levels[unit.kind][level] for unit, level in zip(self._own(spans), levels)]
        rerun_s, out_s, back_s = (
            sum(getattr(level, name) for level in chosen) for name in ("rerun_s", "out_s", "back_s")
        )
        extra_s = float(self._beside(spans, tier).extra_s(rerun_s, out_s, back_s))
        return Fit(levels, rerun_s, self.peak_bytes(spans, depths, levels), extra_s)

    def extra_s(self, spans: Spans, depths: Sequence[int], budget_bytes: float) -> float:
        """Return the seconds that the levels of `fit` add to a micro-batch; infinity if no levels fit."""
        key = spans, tuple(depths), budget_bytes
        if key not in self._extras:
            found = self._least(spans, depths, budget_bytes)
            self._extras[key] = math.inf if found is None else found.extra_s
        return self._extras[key]

    def _least(self, spans: Spans, depths: Sequence[int], budget_bytes: float) -> _Choice | None:
        """Return the choice of levels within the budget that adds the fewest seconds.

        Transfers go on beside the forwards of all units, and beside their backwards and reruns.
        """
        fixed, last_kind = self.fixed_bytes(spans, depths), self.units[spans[-1][1] - 1].kind
        scale = _one_depth(depths)  # bytes of units in one depth are in proportion to it
        rest = self._frontier(_without_last(spans), [depth // scale for depth in depths])
        beside = None if self.tier is None else self._beside(spans, self.tier)
        best: _Choice | None = None
        for number, level in enumerate(self.levels[last_kind]):
            least = fixed + depths[-1] * level.kept_bytes + level.rederived_bytes
            most = (budget_bytes - least) / scale, self._most_away(level, depths[-1]) / scale
            found = self._chosen(rest, level, most, beside)
            if found is not None:
                extra_s, row = found
                moved_s = level.moved_s + float(rest.out_s[row] + rest.back_s[row])
                taken = float(least + scale * rest.num_bytes[row])
                if best is None or (extra_s, moved_s, taken) < (best.extra_s, best.moved_s, best.num_bytes):
                    rerun_s = float(rest.rerun_s[row] + level.rerun_s)
                    best = _Choice(extra_s, moved_s, taken, rerun_s, number, rest, row)
        return best

    def _most_away(self, last: Level, depth: int) -> float:
        """Return the room that the tier has for all micro-batches in flight, beside what a last unit has there."""
        capacity = None if self.tier is None else self.tier.capacity_bytes
        return math.inf if capacity is None else capacity - depth * last.away_bytes

    @staticmethod
    def _chosen(
        rest: Frontier, level: Level, most: tuple[float, float], beside: Beside | None
    ) -> tuple[float, int] | None:
        """Return the fewest seconds that units add beside a last unit at `level`, and their row.

        most: the bytes that they may keep, and that they may have away.
        """
        if beside is None:
            row = int(np.searchsorted(rest.num_bytes, most[0], side="right")) - 1
            return None if row < 0 else (float(rest.rerun_s[row] + level.rerun_s), row)
        (rows,) = np.nonzero((rest.num_bytes <= most[0]) & (rest.away_bytes <= most[1]))
        if not len(rows):
            return None
        rerun, out, back = (getattr(rest, name)[rows] + getattr(level, name) for name in ("rerun_s", "out_s", "back_s"))
        extra = beside.extra_s(rerun, out, back)
        (ties,) = np.nonzero(extra <= extra.min())
        first = ties[np.argmin((out + back)[ties])]
        return float(extra[first]), int(rows[first])

    def _beside(self, spans: Spans, tier: Tier) -> Beside:
        """Return what a stage computes beside its transfers."""
        forward_s, backward_s = (
            sum(self._before_s[name][stop] - self._before_s[name][first] for first, stop in spans)
            for name in ("forward", "backward")
        )
        return Beside(forward_s, backward_s, tier.overlap)

    @cached_property
    def _before_s(self) -> dict[str, list[float]]:
        """Return the seconds of all units before each, and of all of them, in forwards and in backwards."""
        forward = (unit.forward_s for unit in self.units)
        backward = (self._backward_s(unit) for unit in self.units)
        return {
            "forward": list(itertools.accumulate(forward, initial=0.0)),
            "backward": list(itertools.accumulate(backward, initial=0.0)),
        }

    def _backward_s(self, unit: Unit) -> float:
        """Return the seconds of a unit's backward in which what has left comes back."""
        return unit.backward_s - (unit.weight_s if self.splits_backward else 0.0)

    @cached_property
    def _kinds_before(self) -> list[tuple[int, ...]]:
        """Return, for each unit and the end, how many units of each kind are before it."""
        found = [(0,) * len(self.levels)]
        for unit in self.units:
            found.append(tuple(num + (kind == unit.kind) for kind, num in enumerate(found[-1])))
        return found

    def _levels_of(
        self, own: Sequence[Unit], weights: Sequence[int], last: int, rest: list[tuple[Key, int]]
    ) -> tuple[int, ...]:
        """Return each unit's level: the levels with most reruns go to the first units, whose backward comes last."""
        left: dict[Key, list[int]] = {}
        for key, level in sorted(rest, reverse=True):
            left.setdefault(key, []).append(level)
        queues = {key: iter(levels) for key, levels in left.items()}
        return (*(next(queues[unit.kind, depth]) for unit, depth in zip(own[:-1], weights)), last)

    def _frontier(self, spans: Spans, depths: Sequence[int]) -> Frontier:
        """Return the choices of levels that no other beats, of all units of `spans`.

        They are made of those of all units but the last. So all frontiers are of stretches of the model; of repeated blocks, many
        stretches have as many units of each kind, and share one.
        """
        kinds = self._kinds(spans, depths)
        if not kinds:
            return Frontier.of_no_units()
        if kinds not in self._frontiers:
            fewer = self._frontier(_without_last(spans), depths)
            kind = self.units[spans[-1][1] - 1].kind
            self._frontiers[kinds] = fewer.with_unit((kind, depths[len(spans) - 1]), self.levels[kind])
        return self._frontiers[kinds]

    def _kinds(self, spans: Spans, depths: Sequence[int]) -> tuple[tuple[Key, int], ...]:
        """Return how many units there are of each kind and depth."""
        found: dict[Key, int] = {}
        for (first, stop), depth in zip(spans, depths):
            for kind, (before, after) in enumerate(zip(self._kinds_before[first], self._kinds_before[stop])):
                if after > before:
                    found[kind, depth] = found.get((kind, depth), 0) + after - before
        return tuple(sorted(found.items()))

    # Seconds

    def seconds(self, cuts: Sequence[int], fits: Sequence[Fit]) -> list[StageSeconds]:
        """Return the seconds of each piece under the levels `fits` of each stage."""
        levels = self.by_piece(cuts, fits)
        held: list[set[str]] = [set() for _ in range(self.num_stages)]
        found = []
        for piece, ((first, stop), own) in enumerate(zip(self.spans(cuts), levels)):
            units, is_last = self.units[first:stop], stop == len(self.units)
            more_forward_s, more_backward_s = self.more_s(units, own)
            behind = None if is_last else self.units[stop]
            before = held[piece % self.num_stages]
            new = self.params_of(((first, stop),)) - before
            before |= new
            found.append(
                StageSeconds(
                    forward_s=sum(unit.forward_s for unit in units) + more_forward_s,
                    backward_s=sum(unit.backward_s for unit in units) + more_backward_s,
                    begin_s=max(unit.begin_s for unit in units),
                    reduce_s=sum(unit.reduce_s for unit in units),
                    update_s=sum(self.params[name].update_s for name in sorted(new)),
                    hand_s=0.0 if behind is None else self.hops[piece].seconds(behind.given_bytes),
                    return_s=0.0 if behind is None else self.hops[piece].seconds(behind.returned_bytes),
                    weight_s=sum(unit.weight_s for unit in units),
                )
            )
        return found

    def more_s(self, units: Sequence[Unit], levels: Sequence[int]) -> tuple[float, float]:
        """Return what a piece's levels add to its forward, and to its backward."""
        chosen = [self.levels[unit.kind][level] for unit, level in zip(units, levels)]
        rerun_s = sum(level.rerun_s for level in chosen)
        if self.tier is None:
            return 0.0, rerun_s
        forward_s, backward_s = sum(unit.forward_s for unit in units), sum(map(self._backward_s, units)) + rerun_s
        out_s, back_s = sum(level.out_s for level in chosen), sum(level.back_s for level in chosen)
        return self.tier.exposed_s(out_s, forward_s), rerun_s + self.tier.exposed_s(back_s, backward_s)

    def by_piece(self, cuts: Sequence[int], fits: Sequence[Fit]) -> list[tuple[int, ...]]:
        """Return the levels of each piece's units, from the levels `fits` of each stage."""
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for spans, fit in zip(self.stages(cuts), fits):
            at = 0
            for first, stop in spans:
                found[first, stop] = fit.levels[at : at + stop - first]
                at += stop - first
        return [found[span] for span in self.spans(cuts)]

    def tied(self, cuts: Sequence[int]) -> list[Tied]:
        """Return the sums of tied parameters' gradients over stages, one for all parameters that the same stages read."""
        return tied_sums(
            {
                name: tuple(sorted({self.stage_at(cuts, at) % self.num_stages for at in units}))
                for name, units in self.tied_params.items()
            },
            {name: self.params[name].grad_bytes for name in self.tied_params},
            self.hops,
        )

    @staticmethod
    def stage_at(cuts: Sequence[int], unit: int) -> int:
        """Return the index of the piece that has a unit."""
        return bisect.bisect_right(list(cuts), unit)


def tied_sums(stages: dict[str, tuple[int, ...]], grad_bytes: dict[str, float], hops: Sequence[Hop]) -> list[Tied]:
    """Return, for each set of stages that share parameters, the seconds of the sums of their gradients.

    Each parameter is all-reduced over the n stages that hold it, priced as in `hardware.collectives`:
    2 (n − 1) α + 2 (n − 1)/n · B/β on the slowest link between them.
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


def _without_last(spans: Spans) -> Spans:
    """Return the units of each piece without the very last one."""
    (first, stop), others = spans[-1], spans[:-1]
    return (*others, (first, stop - 1)) if stop - first > 1 else others


def _one_depth(depths: Sequence[int]) -> int:
    """Return the depth of all pieces of a stage where they have the same, else 1."""
    return depths[0] if len(set(depths)) == 1 else 1
