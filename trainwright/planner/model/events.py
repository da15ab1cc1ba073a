"""What happens in a region, in the forward or in the backward, and where: what travels, what is computed, what is exchanged.

An op has its inputs made one by one, in their order, before it runs; the backward is the same in reverse. Seconds are in units of
`problem.unit_s`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ...program.blocks import Region, RegionClass
from ...program.groups import Group
from ...program.layout import Layout
from ...program.program import Op
from ...program.transition import gradient_layout, transition
from ...rank.travel import last_buffer_share
from ..problem.problem import Problem, Source, Use, Want
from .joined import Leg, Way
from .milp import Terms
from .sharding import Sharding, aligned, flow_s, has_one_want

OpPlace = tuple[int, int, int]
"""A region in the order of the forward, the position of an op in it, and a number: that of the op is 0, of what it reads, below."""
BEGIN = (-1, 0, 0)
_READ, _INSIDE, _BEFORE = 4, 2, 1
"""The distances of what an op reads, of an exchange inside of an op, and of what comes directly before either."""
FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Trip:
    """One direction of a reshard that a column chooses."""

    place: OpPlace
    """Where the parameter is first read."""
    served: Any
    """Whom it serves: of all trips that serve the same, one is chosen at most."""
    column: int
    leg: Leg
    unit_s: float
    count: float = 1.0
    """The number of such trips, or the share of them that is followed."""
    wanted: tuple[int, ...] | None = None
    """The columns of which one is chosen if it is read here; None where it is read last, if it travels at all."""
    alone: Any = None
    """The same for all of one copy, which several ops read and nothing else joins."""

    @property
    def key(self) -> Any:
        """Return the collective that it joins, or what all of one copy have in common; None for what is read in one place."""
        return self.leg.join.key if self.leg.join else self.alone

    @property
    def early(self) -> float:
        return self.count * self.leg.early_s / self.unit_s

    @property
    def late(self) -> float:
        return self.count * self.leg.late_s / self.unit_s

    @property
    def lead(self) -> float:
        """Return the part of what is late that runs before any link is taken."""
        return self.leg.lead * self.late

    @property
    def latency(self) -> float:
        return self.leg.early * self.leg.join.latency_s / self.unit_s if self.leg.join else 0.0

    @property
    def late_latency(self) -> float:
        return (1 - self.leg.early) * self.leg.join.latency_s / self.unit_s if self.leg.join else 0.0

    @property
    def buffer_share(self) -> float:
        """Return the share of a buffer that it fills."""
        return self.leg.join.share if self.leg.join else 0.0


@dataclass(frozen=True)
class Moment:
    """An interval in which others are on their way, if a column chooses it."""

    place: OpPlace
    column: int
    seconds: float
    links: frozenset[int] = frozenset()
    """The links that it goes over, on which it hides nothing."""


@dataclass(frozen=True)
class Exchange:
    """An exchange that a column chooses, which goes over its links behind all that is on its way there."""

    place: OpPlace
    links: frozenset[int]
    served: Any
    """Whom it serves: of all exchanges that serve the same, one is chosen at most."""
    columns: tuple[int, ...]
    reads: Terms | None = None
    """The terms that are 1 where the copy is first read here, and else 0 or less; None where it is read nowhere else."""


@dataclass(eq=False)
class Events:
    """Tells what happens in the regions of a program, by the columns of its sharding."""

    problem: Problem
    sharding: Sharding

    def __post_init__(self) -> None:
        self._reads: dict[tuple[RegionClass, int], list[Use]] = defaultdict(list)
        for use in self.problem.uses:
            for member in use.members:
                self._reads[use.region_class, member].append(use)
        self._flows: dict[Use, list[tuple[Layout, Want, int]]] = defaultdict(list)
        for (use, native, want), column in self.sharding.flow.items():
            self._flows[use].append((native, want, column))
        self._ways: dict[Use, list[tuple[tuple[Any, Want], int, Way]]] = defaultdict(list)
        for use, served, column, way in self.sharding.joined.within:
            self._ways[use].append((served, column, way))
        self._reshards_of: dict[tuple[Use, int], list[tuple[Use, Want, int, float, frozenset[int]]]] = {}
        self._readers_of: dict[tuple[Use, Want], dict[OpPlace, list[int]]] = {}

    def uses(self, region: Region) -> tuple[Use, ...]:
        """Return what a region reads."""
        return tuple(self._reads[region.region_class, region.member])

    def trips(self, uses: Collection[Use], phase: int) -> list[Trip]:
        """Return how the parameters travel that a region reads, and that begin and end within one."""
        found: list[Trip] = []
        for use in uses if self.sharding.joined.in_buckets else ():
            for served, column, way in self._ways[use] if use.source.is_param else ():
                leg = (way.there, way.back)[phase]
                if leg.seconds and not leg.is_whole_sum:
                    found += self._read_at(use, served, column, leg, 1.0)
        return found

    def sums(self) -> list[Trip]:
        """Return the gradients that stay whole, each with the share of it that leaves last."""
        found: list[Trip] = []
        share = last_buffer_share(sum(each.count * max(each.rest_bytes) for each in self.problem.params))
        for leg, served, column, count in self.sharding.joined.sums:
            reader, want = served
            if isinstance(reader, Use):
                region = reader.region_class.members[reader.members[0]]
                found += [moved(trip, region) for trip in self._read_at(reader, served, column, leg, share * count)]
            else:
                found.append(Trip(self._last_but_one(reader, want), served, column, leg, self.problem.unit_s, share))
        return found

    def _read_at(self, use: Use, served: tuple[Any, Want], column: int, leg: Leg, count: float) -> Iterator[Trip]:
        """Yield a trip for each place where a copy may be read first: with its seconds, where it is read last."""
        readers = self._readers(use, served[1])
        whom, last = _served_by(self.sharding, served), max(readers)
        alone = (use, served[1]) if len(readers) > 1 else None
        for place, wanted in sorted(readers.items()):
            is_last = place == last
            yield Trip(
                place, whom, column, leg, self.problem.unit_s, count if is_last else 0.0,
                None if is_last else tuple(wanted), alone,
            )  # fmt: skip

    def _last_but_one(self, source: Source, want: Want) -> OpPlace:
        """Return where one copy of several regions is read by two at least: the last but one of all places."""
        places = []
        for use in self.problem.uses:
            if use.source is source and (readers := self._readers(use, want)):
                places.append(_at(use.region_class.members[use.members[0]].index, max(readers)))
        return sorted(places)[-2:][0]

    def moments(self, uses: Collection[Use], region_class: RegionClass, phase: int) -> list[Moment]:
        """Return what hides a collective within a region: what is computed, and what goes over other links."""
        costs, unit_s = self.problem.costs, self.problem.unit_s
        found: list[Moment] = []
        for decision in self.problem.of_class(region_class):
            assert decision.group is not None
            for split, column in zip(decision.options, self.sharding.choice[decision]):
                for op in decision.group.ops:
                    seconds = costs.op_s(decision.group, op, split)[phase]
                    found.append(Moment((0, op.position, 0), column, seconds / unit_s))
                    if exchanged_s := costs.inner_s(decision.group, op, split)[phase]:
                        links, place = frozenset(costs.links), _during(_inside(op, phase), phase)
                        found.append(Moment(place, column, exchanged_s / unit_s, links))
        for use, want, column, took_s, taken in self._reshards(uses, phase):
            place = _during(min(self._readers(use, want)), phase)
            found.append(Moment(place, column, took_s / unit_s, taken))
        return found

    def exchanges(self, uses: Collection[Use], region_class: RegionClass, phase: int) -> list[Exchange]:
        """Return the exchanges of a region: reshards of activations, and those inside of ops."""
        columns: dict[Any, list[int]] = defaultdict(list)
        for use, want, column, _, taken in self._reshards(uses, phase):
            if taken:
                columns[use, want, taken].append(column)
        found = []
        for (use, want, taken), chosen in columns.items():
            whom = _served_by(self.sharding, (use, want))
            for place, reads in self._first_reads(use, want):
                found.append(Exchange(place, taken, whom, tuple(chosen), reads))
        links = frozenset(self.problem.costs.links)
        for decision in self.problem.of_class(region_class):
            assert decision.group is not None
            for op in decision.group.ops:
                inner = [self.problem.costs.inner_s(decision.group, op, split)[phase] for split in decision.options]
                chosen = [column for column, took_s in zip(self.sharding.choice[decision], inner) if took_s]
                if chosen:
                    found.append(Exchange(_inside(op, phase), links, (decision, op), tuple(chosen)))
        return found

    def _reshards(self, uses: Collection[Use], phase: int) -> Iterator[tuple[Use, Want, int, float, frozenset[int]]]:
        """Yield the reshards of activations that take time: the column that chooses it, its seconds, and the links it goes over."""
        for use in uses:
            if (use, phase) not in self._reshards_of:
                self._reshards_of[use, phase] = list(self._reshards_to(use, phase))
            yield from self._reshards_of[use, phase]

    def _reshards_to(self, use: Use, phase: int) -> Iterator[tuple[Use, Want, int, float, frozenset[int]]]:
        links = self.problem.costs.links
        for native, want, column in self._flows[use] if not use.source.is_param else ():
            if seconds := flow_s(self.problem, use, native, want)[phase]:
                there, back = aligned(use, native, want)
                steps = transition(native, there) if phase == FORWARD else transition(back, gradient_layout(native))
                taken = frozenset(links[step.axis] for step in steps if step.kind != "slice")
                yield use, want, column, seconds, taken

    def _readers(self, use: Use, want: Want) -> dict[OpPlace, list[int]]:
        """Return by place the columns of which one is chosen where a copy is wanted there."""
        if (use, want) not in self._readers_of:
            found: dict[OpPlace, list[int]] = defaultdict(list)
            for demand in use.demands:
                if demand.decision.group is not None and (columns := self.sharding.wanting(demand, want)):
                    found[_reads_at(use, demand.decision.group)] += columns
            self._readers_of[use, want] = dict(found)
        return self._readers_of[use, want]

    def _first_reads(self, use: Use, want: Want) -> Iterator[tuple[OpPlace, Terms | None]]:
        """Yield each place where a copy may be read first, with the terms that are 1 where it is."""
        readers = self._readers(use, want)
        sooner: list[int] = []
        for place, columns in sorted(readers.items()):
            first = [*((column, 1.0) for column in columns), *((column, -1.0) for column in sooner)]
            yield place, first if len(readers) > 1 else None
            sooner += columns

    def whole_backward(self, followed: Collection[int]) -> tuple[list[Moment], list[Exchange]]:
        """Return what runs in the backward, op by op and with exchanges in the regions `followed`."""
        moments: list[Moment] = []
        exchanges: list[Exchange] = []
        for is_followed, run in groupby(self.problem.program.regions, lambda region: region.index in followed):
            regions = list(run)
            if not is_followed:
                moments += self._between(regions)
                continue
            for region in regions:
                uses = self.uses(region)
                moments += [moved(each, region) for each in self.moments(uses, region.region_class, BACKWARD)]
                exchanges += [moved(each, region) for each in self.exchanges(uses, region.region_class, BACKWARD)]
        return moments, exchanges

    def _between(self, regions: list[Region]) -> Iterator[Moment]:
        """Yield what is computed in the backward of regions as a whole."""
        for region_class, count in Counter(region.region_class for region in regions).items():
            for decision in self.problem.of_class(region_class):
                for seconds, column in zip(decision.backward_s, self.sharding.choice[decision]):
                    yield Moment((regions[0].index, 0, 0), column, count * seconds / self.problem.unit_s)


def moved(event: Any, region: Region) -> Any:
    """Return an event of a region, told among those of the whole step."""
    return replace(event, place=_at(region.index, event.place))


def _served_by(sharding: Sharding, served: tuple[Any, Want]) -> Any:
    """Return what has one copy at most: a reader that asks for one, whichever that is, or else one copy that a reader asks for."""
    reader, _ = served
    is_one = isinstance(reader, Use) and has_one_want(reader)
    return reader if is_one and all(reader.source is not tied.source for tied in sharding.tied) else served


def _reads_at(use: Use, group: Group) -> OpPlace:
    """Return where a group reads a copy first: an op has its inputs made in their order, before it runs."""
    op = min((op for op in group.ops if use.tensor in op.inputs), key=lambda op: op.position)
    return 0, op.position, _READ * (op.inputs.index(use.tensor) - len(op.inputs))


def _at(region: int, place: OpPlace) -> OpPlace:
    return region, *place[1:]


def before(place: OpPlace) -> OpPlace:
    """Return what comes directly before a place, in the forward."""
    return *place[:2], place[2] - _BEFORE


def _during(place: OpPlace, phase: int) -> OpPlace:
    """Return where what begins at a place takes its time: behind it, as the phase goes."""
    return place if phase == FORWARD else before(place)


def _inside(op: Op, phase: int) -> OpPlace:
    """Return where an op communicates: when it is computed, in either phase."""
    return 0, op.position, _INSIDE if phase == FORWARD else -_INSIDE


def has_links(problem: Problem) -> bool:
    """Tell whether collectives over one link run beside those over another."""
    return len(set(problem.costs.links)) > 1
