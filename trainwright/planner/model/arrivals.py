"""What a step waits for of what is on its way: rows that follow one link's clock through a region.

Where the gathers and reductions of a region begin and end within it (`buckets`), gathers are issued where the region begins, one
after the other in the order of their readers, and each is waited for where it is read; a gradient is reduced as soon as it is
made, and waited for where the region's backward ends. Both have one recursion, since each is the other in reverse:

    X_p ≥ X_q + T_p − Σ {seconds of the ops between p and the place before it} · x         X ≥ 0; q: the place behind p

X_p are the seconds that are waited for what is read at p and behind it, T_p the seconds on the link of what is read at p. What the
region waits is X at its first place.

Gathers that one collective joins pay its latency once, where the first is read; gradients that share a buffer leave with the last
of them to be made, which is that of their first reader. Of those, T is what A rises by:

    A_p ≥ Σ {joined, read up to p}                                  and the latency, if one of them is
    A_p ≥ Σ {all that share the buffer} − M · (1 − f_p)             for every member p

An exchange goes over its link behind all that is on its way there, and what runs after it hides none of that. In the forward, that
is all that the region gathers; in the backward, what has left by then, and it is waited for once:

    forward      X_q ≥ Σ {gathers read at q and behind it} − M · (1 − g)
    backward     V_q ≥ X_q − M · (1 − g),     X_q − V_q in place of X_q before it,     X + Σ V is waited

What is copied, and exchanges over other links, hide a collective as computation does. Several links have an X each, and one V. What
is not issued early of a reshard runs when it is waited for, behind all that is on its way on its link.

Where parameters travel a region ahead, what a region gathers is waited for in the next, and only its exchanges wait for what is on
its way: in the forward for what the next region gathers, in the backward for what is reduced. The first region has nothing before
it: there its own gathers are waited for where they are read, and its reductions where the backward ends.

Gradients that stay whole share one bucket for the whole step. Of them the last buffer, a share of all, is followed from where it
leaves to the end of the backward, together with what the first region reduces (`add_last_waits`). `events` says what happens where.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...program.blocks import RegionClass
from ...rank.travel import regions_ahead
from ..problem.problem import Use
from .events import (
    BACKWARD,
    BEGIN,
    FORWARD,
    Events,
    Exchange,
    Moment,
    OpPlace,
    Trip,
    before,
    has_links,
    moved,
)
from .implied import SLACK
from .milp import Model, Terms
from .sharding import Sharding

WAITS = "what is waited for"
_FEW = 4
"""A sum of so many terms is written out wherever it stands."""
_FEW_OF = 3
"""Regions are not followed of which a class has so many times as many that read alike: E is no more than is waited."""


@dataclass(eq=False)
class Waits:
    """A column of what is waited: the largest of 0 and some sums, since it has a cost. All columns are in units of `unit_s`."""

    column: int
    floors: list[tuple[int, Terms]] = field(default_factory=list)
    """The rows column ≥ Σ terms, with the terms."""
    parts: list[tuple[int, tuple[Terms, ...]]] = field(default_factory=list)
    """The columns that stand in those rows, in order, each with the sums of which, and of 0, it is the largest."""

    def add_floor(self, model: Model, name: str, terms: Terms) -> None:
        """Add the row that holds the column at the sum of `terms` or above."""
        self.floors.append((model.row(name, [*terms, (self.column, -1.0)], upper=0.0), terms))

    def largest(self, model: Model, *sums: Terms, most: float = math.inf) -> Terms:
        """Return the largest of 0 and some sums, as a column that is no less than each; `most` is more than all of them."""
        column = model.column(most)
        self.parts.append((column, sums))
        for terms in sums:
            model.row(WAITS, [(column, -1.0), *terms], upper=0.0)
        return [(column, 1.0)]


@dataclass(frozen=True)
class _Kind:
    """The regions of a class that read alike, so that all of them wait alike."""

    region_class: RegionClass
    uses: tuple[Use, ...]
    """The reads of each."""
    is_whole: bool = True
    """True if what it gathers and reduces begins and ends within it."""
    following: tuple[Use, ...] = ()
    """The parameters of the region behind, whose gathers begin here."""


def add_waits(model: Model, events: Events, phase: int, exchanges_wait: bool = True) -> list[tuple[Waits, int]]:
    """Add the columns and rows of `FORWARD` or `BACKWARD`; return those of all regions that wait alike, with their number.

    The backward of the first region is left to `add_last_waits`. exchanges_wait: they wait for what is on its way on their link.
    """
    found = []
    for kind, count in _kinds(events, phase).items():
        # those of a region that nothing precedes are waited for in it; in the backward, exchanges wait for any region's
        legs = events.trips(kind.uses, phase) if kind.is_whole or phase == BACKWARD else []
        trips = [trip for trip in legs if trip.leg.early]
        ahead = [trip for trip in events.trips(kind.following, phase) if trip.leg.early] if phase == FORWARD else []
        if trips or ahead:
            waits = Waits(model.column())
            moments, late = _late(legs, phase)
            moments += events.moments(kind.uses, kind.region_class, phase)
            exchanges = [*late, *events.exchanges(kind.uses, kind.region_class, phase)] if exchanges_wait else []
            clock = _Clock(model, waits, phase, trips, moments, exchanges)
            for waited in clock.forward(ahead) if phase == FORWARD else clock.backward(kind.is_whole):
                waits.add_floor(model, WAITS, waited)
            found.append((waits, count))
    return found


def add_last_waits(model: Model, events: Events, exchanges_wait: bool = True) -> tuple[Waits, Waits]:
    """Add the columns and rows of what is waited because of gradients that stay whole, and of those that the first region reduces.

    Return what all of the backward waits because of them, and what the first region does, with which the backward ends. The two
    are the same where all collectives go over one link.
    """
    first = events.problem.program.regions[0]
    legs = [moved(trip, first) for trip in events.trips(events.uses(first), BACKWARD)]
    sums = events.sums()
    everywhere = Waits(model.column())
    at_end = Waits(model.column()) if has_links(events.problem) else everywhere
    moments, exchanges = events.whole_backward({first.index, *(trip.place[0] for trip in sums)})
    trips = [*(trip for trip in legs if trip.leg.early), *sums]
    last = frozenset(trip.key for trip in sums)
    waiting = exchanges if exchanges_wait else []
    clock = _Clock(model, everywhere, BACKWARD, trips, moments, waiting, last, events.sharding)
    late = [*_late_of_regions(clock, events, legs, sums), *_late_of_sums(clock, sums)]
    clock.moments = [*late, *clock.moments]  # all at the very end of the backward
    for waited, ending in clock.backward_of(first.index):
        everywhere.add_floor(model, WAITS, [*waited, *ending])
        if at_end is not everywhere:
            at_end.add_floor(model, WAITS, ending)
    return everywhere, at_end


def _kinds(events: Events, phase: int) -> dict[_Kind, int]:
    """Return how many regions there are of each kind, in the backward without the first."""
    regions, joined = events.problem.program.regions, events.sharding.joined
    found: dict[_Kind, int] = defaultdict(int)
    for region, following in zip(regions, [*regions[1:], None]):
        if region is regions[0] and phase == BACKWARD:
            continue
        kind = _Kind(region.region_class, events.uses(region))
        if regions_ahead(joined.travel):
            behind = () if following is None or phase == BACKWARD else events.uses(following)
            params = tuple(use for use in behind if use.source.is_param)
            kind = replace(kind, is_whole=region is regions[0], following=params)
        found[kind] += 1
    most: dict[RegionClass, int] = defaultdict(int)
    for kind, count in found.items():
        most[kind.region_class] = max(most[kind.region_class], count)
    return {kind: count for kind, count in found.items() if count * _FEW_OF >= most[kind.region_class]}


def _late(trips: Iterable[Trip], phase: int) -> tuple[list[Moment], list[Exchange]]:
    """Return what of reshards is not issued early, and runs when it is waited for."""
    moments: list[Moment] = []
    exchanges: list[Exchange] = []
    for trip in (trip for trip in trips if trip.late):
        links = trip.leg.late_links
        if phase == BACKWARD:  # all is waited for at the end, what was issued last first
            moments.append(Moment(BEGIN, trip.column, trip.late, links | {trip.leg.link}))
            continue
        moments.append(Moment(before(trip.place), trip.column, trip.lead))
        moments.append(Moment(trip.place, trip.column, trip.late - trip.lead, links))
        if links:
            exchanges.append(Exchange(trip.place, links, (trip.served, "late"), (trip.column,)))
    return moments, exchanges


def _late_of_regions(clock: _Clock, events: Events, legs: Sequence[Trip], sums: Sequence[Trip]) -> Iterator[Moment]:
    """Yield what of the reductions that are waited for at the end is not issued early; sums are waited for after it.

    They are those of the first region and, where parameters travel a region ahead, of the second.
    """
    second = events.problem.program.regions[1:2] if regions_ahead(events.sharding.joined.travel) else []
    for trip in (trip for region in second for trip in events.trips(events.uses(region), BACKWARD)):
        yield Moment(BEGIN, trip.column, trip.late, trip.leg.late_links)
    groups: dict[tuple[frozenset[int], int], list[Trip]] = defaultdict(list)
    for trip in (trip for trip in legs if trip.late):
        groups[trip.leg.late_links, trip.leg.link].append(trip)
    for (links, own), trips in groups.items():
        late = [(trip.column, trip.late) for trip in trips]
        yield from _hiding(clock, late, links, _most(trips, lambda trip: trip.late), sums, own)


def _late_of_sums(clock: _Clock, sums: Sequence[Trip]) -> Iterator[Moment]:
    """Yield what of sums is not issued early: where there are others, it may hide those that are waited for after it."""
    by_key = _by_key(sums)
    for key, trips in by_key.items():
        links, latency = trips[0].leg.late_links, max(trip.late_latency for trip in trips)
        most = latency + _most(trips, lambda trip: trip.late)
        if not most:
            continue
        # one latency, unless none of them is chosen
        none = clock.waits.largest(clock.model, [(clock.one, latency), *_times(-latency, _ones(trips))])
        late = [*((trip.column, trip.late) for trip in trips), (clock.one, latency), *_minus(none)]
        yield from _hiding(clock, late, links, most, [trip for trip in sums if trip.key != key])


def _hiding(
    clock: _Clock, late: Terms, links: frozenset[int], most: float, others: Sequence[Trip], own: int | None = None
) -> Iterator[Moment]:
    """Yield what hides those that are on other links than `links`; on the link `own`, by default on any, only if `others` travel.

    most: the most that `late` may be.
    """
    alone = clock.waits.largest(clock.model, [*late, *_times(-most, _ones(others))])
    elsewhere = frozenset(trip.leg.link for trip in clock.trips if own is not None and trip.leg.link != own)
    yield from (Moment(BEGIN, column, seconds, links) for column, seconds in late)
    yield from (Moment(BEGIN, column, -1.0, links | elsewhere) for column, _ in alone)


def _serving(sharding: Sharding, trips: Sequence[Trip], one: int) -> dict[Any, Terms]:
    """Return for each region's reader of what is tied the terms that are 1 where it reads the one copy of several regions."""
    copies: dict[Any, Terms] = defaultdict(list)
    for trip in trips:
        copies[trip.served].append((trip.column, 1.0))
    found: dict[Any, Terms] = {}
    for tied in sharding.tied:
        for use, want in ((use, want) for use in tied.uses for want in tied.wants if (use, want) in copies):
            reader = next(demand for demand in use.demands if sharding.wanting(demand, want))
            wanted = [(column, 1.0) for column in sharding.wanting(reader, want)]
            found[use, want] = [*copies[use.source, want], *wanted, (one, -1.0)]
    return found


@dataclass(eq=False)
class _Clock:
    """Follows the clocks of the links through a region, or through the whole backward."""

    model: Model
    waits: Waits
    phase: int
    trips: Sequence[Trip]
    moments: Sequence[Moment]
    exchanges: Sequence[Exchange]
    sums: frozenset[Any] = frozenset()
    """The collectives of sums that stay whole, of which `count` has the share that leaves last."""
    sharding: Sharding | None = None
    """The sharding, where there are such sums."""
    one: int = field(init=False)

    def __post_init__(self) -> None:
        self.one = self.model.one()
        self.moments = sorted(self.moments, key=lambda moment: moment.place)

    def forward(self, ahead: Sequence[Trip] = ()) -> Iterator[Terms]:
        """Yield for each link terms whose sum is waited at least; `ahead` begin with the region, and are not read in it."""
        for link in dict.fromkeys(trip.leg.link for trip in (*self.trips, *ahead)):
            trips, coming = ([trip for trip in each if trip.leg.link == link] for each in (self.trips, ahead))
            taken, going = self._taken(trips), self._going(link)
            here: Terms = []
            behind = self._sum(self._all(coming))
            places = sorted({*taken, *going}, reverse=True)
            for place, lower in zip(places, [*places[1:], BEGIN]):
                here, behind = [*here, *taken.get(place, [])], self._sum([*behind, *taken.get(place, [])])
                if place in going and behind:
                    most = self._most([*coming, *(trip for trip in trips if trip.place >= place)])
                    sums = [here] if here else []
                    here = self.waits.largest(self.model, *sums, *self._where(going[place], behind, most))
                here = self._left(here, link, lower, place)
            if here:
                yield here

    def backward(self, ends: bool = True) -> Iterator[Terms]:
        """Yield terms whose sum is waited at least; ends: what is on its way is waited for where the backward ends."""
        return (terms for _, terms in self.backward_of(0, ends))

    def backward_of(self, region: int, ends: bool = True) -> Iterator[tuple[Terms, Terms]]:
        """Yield terms whose sum is waited at least: those before a region's backward, and those in it and at its end."""
        links = dict.fromkeys(trip.leg.link for trip in self.trips)
        taken = {link: self._taken([trip for trip in self.trips if trip.leg.link == link]) for link in links}
        going = {link: self._going(link) for link in links}
        here: dict[int, Terms] = {link: [] for link in links}
        sooner: Terms = []
        waited: Terms = []
        places = sorted({place for link in links for place in (*taken[link], *going[link])}, reverse=True)
        for place, lower in zip(places, [*places[1:], BEGIN]):
            stops: list[Terms] = []
            for link in links:
                here[link] = [*here[link], *taken[link].get(place, [])]
                if place in going[link] and here[link]:
                    most = self._most(trip for trip in self.trips if trip.leg.link == link and trip.place >= place)
                    stops += self._where(going[link][place], here[link], most)
            if stops:
                stopped = self.waits.largest(self.model, *stops)
                (waited if place[0] == region else sooner).extend(stopped)
                here = {link: [*terms, *_minus(stopped)] if terms else [] for link, terms in here.items()}
            here = {link: self._left(terms, link, lower, place) for link, terms in here.items()}
        ending = [terms for terms in here.values() if terms] if ends else []
        yield from ((sooner, [*waited, *terms]) for terms in ending)
        if (waited or sooner) and not ending:
            yield sooner, waited

    def _left(self, terms: Terms, link: int, begin: OpPlace, end: OpPlace) -> Terms:
        """Return what is left of the terms when all between two places is computed, the later place first."""
        hidden: dict[int, float] = defaultdict(float)
        first, last = (bisect_left(self.moments, place, key=lambda moment: moment.place) for place in (begin, end))
        for moment in self.moments[first:last] if terms else ():
            if link not in moment.links:
                hidden[moment.column] -= moment.seconds
        return self.waits.largest(self.model, [*terms, *hidden.items()]) if hidden or len(terms) > 1 else terms

    def _taken(self, trips: Iterable[Trip]) -> dict[OpPlace, Terms]:
        """Return by place what is on the link of what is read there, of the places that are followed."""
        found: dict[OpPlace, Terms] = defaultdict(list)
        for key, joined in _by_key(trips).items():
            if key is None:
                for trip in joined:
                    found[trip.place] += _seconds([trip])
            else:
                before: Terms = []
                for place, arrived in self._arrived(joined):
                    found[place] += [*arrived, *_minus(before)]
                    before = arrived
        return dict(found)

    def _arrived(self, trips: Sequence[Trip]) -> Iterator[tuple[OpPlace, Terms]]:
        """Yield, for each place, what is on the link of what joins one collective and is read there or before."""
        is_sum, is_alone = trips[0].key in self.sums, trips[0].leg.join is None
        shares_buffer = self.phase == BACKWARD and _most(trips, lambda trip: trip.buffer_share) <= 1.0
        is_one = is_sum or is_alone or shares_buffer
        serving = {} if self.sharding is None or not is_sum else _serving(self.sharding, trips, self.one)
        together = self._sum(_seconds(trips)) if is_one else []
        latency, most = max(trip.latency for trip in trips), self._most(trips)
        # what leaves later than it does would dodge an exchange
        stops = self.phase == BACKWARD and any(trips[0].leg.link in exchange.links for exchange in self.exchanges)
        sooner: Terms = []
        arrived: Terms = []
        for place in sorted({trip.place for trip in trips}):
            here = [trip for trip in trips if trip.place == place]
            copies = {trip.served: self._chosen(trip.served, here) for trip in here}
            seconds = _seconds(trip for trip in here if trip.count)
            sums: list[Terms] = [arrived] if arrived else []
            if not is_sum:
                sooner = self._sum([*sooner, *seconds])
                sums += [[*sooner, *_times(latency, chosen)] for chosen in copies.values()] if latency else [sooner]
            if self.phase == FORWARD and not is_one:
                sums.append([*arrived, *seconds])
            if is_one:
                for served, chosen in copies.items():
                    terms = _times(most, [*chosen, *serving.get(served, [])])
                    sums.append([*together, *terms, (self.one, latency - most)])
            wanted = (terms for terms in sums if terms)
            before, arrived = arrived, self.waits.largest(self.model, *wanted, most=(1 + SLACK) * most)
            if stops:
                lent = [(column, 1.0) for served in copies for column, weight in serving.get(served, []) if weight > 0]
                self.model.row(WAITS, [*arrived, *_minus(before), *_times(-most, [*_ones(here), *lent])], upper=0.0)
            yield place, arrived
        if stops:
            self.model.row(WAITS, [*arrived, *_minus(self._sum(_seconds(trips)))], upper=latency)

    def _all(self, trips: Iterable[Trip]) -> Iterator[tuple[int, float]]:
        """Yield what is on the link of all trips together."""
        for joined in _by_key(trip for trip in trips if trip.count).values():
            seconds, latency = _seconds(joined), max(trip.latency for trip in joined)
            if latency:
                together = self._sum(seconds)
                copies = {trip.served: _ones(each for each in joined if each.served == trip.served) for trip in joined}
                sums = [[*together, *_times(latency, columns)] for columns in copies.values()]
                seconds = self.waits.largest(self.model, *sums)
            yield from seconds

    def _chosen(self, served: Any, trips: Iterable[Trip]) -> Terms:
        """Return the terms that are 1 where a copy travels and is read at the place of `trips`, and else 0 or less."""
        of_copy = [trip for trip in trips if trip.served == served]
        wanted = of_copy[0].wanted
        read = [] if wanted is None else [*((column, 1.0) for column in wanted), (self.one, -1.0)]
        return [*_ones(of_copy), *read]

    def _going(self, link: int) -> dict[OpPlace, list[Exchange]]:
        """Return by place the exchanges that go over a link, those that serve the same as one."""
        merged: dict[tuple[OpPlace, Any], Exchange] = {}
        for exchange in self.exchanges:
            if link in exchange.links:
                key = exchange.place, exchange.served
                columns = merged[key].columns if key in merged else ()
                merged[key] = replace(exchange, columns=(*columns, *exchange.columns))
        found: dict[OpPlace, list[Exchange]] = defaultdict(list)
        for exchange in merged.values():
            found[exchange.place].append(exchange)
        return dict(found)

    def _where(self, exchanges: Sequence[Exchange], terms: Terms, most: float) -> list[Terms]:
        """Return, for each exchange, terms that are no more than 0 unless it is chosen."""
        found = []
        for each in exchanges:
            chosen = [*((column, 1.0) for column in each.columns), (self.one, -1.0)]
            if each.reads is not None:
                chosen += [*each.reads, (self.one, -1.0)]
            found.append([*terms, *_times(most, chosen)])
        return found

    def _sum(self, terms: Iterable[tuple[int, float]]) -> Terms:
        """Return a sum, as one column where it has many terms."""
        terms = list(terms)
        return terms if len(terms) <= _FEW else self.waits.largest(self.model, terms)

    def _most(self, trips: Iterable[Trip]) -> float:
        """Return the most that trips take, where each copy is served from one layout."""
        trips = list(trips)
        latencies: dict[Any, float] = defaultdict(float)
        for trip in trips:
            latencies[trip.key] = max(latencies[trip.key], trip.latency)
        return _most(trips, lambda trip: trip.early) + sum(latencies.values())


def _most(trips: Sequence[Trip], amount: Callable[[Trip], float]) -> float:
    """Return the most that trips amount to, where each copy is served from one layout."""
    most: dict[Any, float] = defaultdict(float)
    for trip in trips:
        most[trip.served] = max(most[trip.served], amount(trip))
    return sum(most.values())


def _by_key(trips: Iterable[Trip]) -> dict[Any, list[Trip]]:
    """Return the trips by the collective that they join."""
    found: dict[Any, list[Trip]] = defaultdict(list)
    for trip in trips:
        found[trip.key].append(trip)
    return found


def _ones(trips: Iterable[Trip]) -> Terms:
    return [(trip.column, 1.0) for trip in trips]


def _times(factor: float, terms: Terms) -> Terms:
    return [(column, factor * coefficient) for column, coefficient in terms]


def _minus(terms: Terms) -> Terms:
    return _times(-1.0, terms)


def _seconds(trips: Iterable[Trip]) -> Terms:
    return [(trip.column, trip.early) for trip in trips]
