"""What a region waits for of what it gathers and reduces, where both begin and end within the region (`buckets`).

Gathers are issued where the region begins, one after the other in the order of their readers, and each is waited for where it
is read: a reader at p for those of all readers up to p over the same link, while the ops before p compute.

    E ≥ Σ {gathers read up to p} − K_p           for every reader p
    K_p ≤ K_q + Σ {seconds of the ops from q to p} · x          q: the reader before p

E are the seconds that one region waits. The backward is the same in reverse: a gradient is reduced as soon as it is made, and
the ops before its reader are those whose backward is yet to run. Gradients that share a buffer leave with the last of them to
be made, which is that of their first reader:

    E ≥ Σ {reductions of the buffer} + Σ {others, read up to p} − K_p − M · (1 − f_p)           for every member p

Gradients that stay whole share one bucket for the whole step. The last buffer, a share s of them, is waited for at its end:

    E ≥ s · Σ {sums} − K_p − M · (1 − f_p)           for every member p, with K_p from the first region on

An exchange g in the backward goes over its link behind all that is on its way there. What runs after it hides none of that:

    K_q ≤ M · (1 − g)           q: where the exchange is

Exchanges over other links hide a collective, and count as computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...program.blocks import RegionClass
from ...program.layout import Layout
from ...program.transition import gradient_layout, transition
from ...rank.travel import last_buffer_share, regions_ahead
from ..problem.problem import Problem, Use, Want
from .joined import Leg
from .milp import Model, Terms
from .sharding import Sharding, flow_s, has_one_want

WAITS = "what a region waits for"
NEAR_END = 2
"""A step's end waits for sums that leave in the backward of so many regions; what leaves sooner, a whole region hides."""
_Place = tuple[int, int]
"""A region, in the order of the forward, and a position in it."""
_Moment = tuple[_Place, int, float]
"""Where something runs, the column that chooses it, and what it takes, in units of `unit_s`."""


@dataclass(frozen=True)
class _Exchange:
    """An exchange in the backward, which goes over its links behind all that is on its way there."""

    place: _Place
    is_behind: bool
    """True if the gradient of what is read there is on its way by then."""
    links: frozenset[int]
    columns: tuple[int, ...]
    """Those of which one chooses it."""


@dataclass(eq=False)
class Waits:
    """A column of what is waited: the largest of 0 and some sums, since it has a cost. All columns are in units of `unit_s`."""

    column: int
    floors: list[tuple[int, Terms]] = field(default_factory=list)
    """The rows column ≥ Σ terms, with the terms."""
    sums: list[tuple[int, tuple[Terms, ...]]] = field(default_factory=list)
    """The columns that stand in those rows, in order, each with the sums of which it is the least."""

    def add_floor(self, model: Model, name: str, terms: Terms) -> None:
        """Add the row that holds the column at the sum of `terms` or above."""
        self.floors.append((model.row(name, [*terms, (self.column, -1.0)], upper=0.0), terms))

    def add_computed(self, model: Model, *sums: Terms) -> int:
        """Add a column K, which is no more than each of `sums`, and return it."""
        column = model.column()
        self.sums.append((column, sums))
        for terms in sums:
            model.row(WAITS, [(column, -1.0), *terms], lower=0.0)
        return column

    def add_travelling(self, model: Model, terms: Terms) -> int:
        """Add a column of seconds on their way, which is no less than the sum of `terms`, and return it."""
        column = model.column()
        self.sums.append((column, (terms,)))
        model.row(WAITS, [(column, -1.0), *terms], upper=0.0)
        return column


@dataclass(frozen=True)
class _Trip:
    """One direction of a reshard that a column chooses."""

    place: _Place
    """Where the parameter is first read."""
    served: Any
    """Whom it serves: of all trips that serve the same, one is chosen at most."""
    column: int
    leg: Leg
    unit_s: float
    count: int = 1

    @property
    def key(self) -> Any:
        """Return the collective that it joins, or None."""
        return self.leg.join and self.leg.join.key

    @property
    def early(self) -> float:
        return self.count * self.leg.early_s / self.unit_s

    @property
    def late(self) -> float:
        return self.count * self.leg.late_s / self.unit_s

    @property
    def latency(self) -> float:
        return self.leg.early * self.leg.join.latency_s / self.unit_s if self.leg.join else 0.0

    @property
    def buffer_share(self) -> float:
        """Return the share of a buffer that it fills."""
        return self.leg.join.share if self.leg.join else 0.0


def add_waits(model: Model, problem: Problem, sharding: Sharding, phase: int) -> list[tuple[Waits, int]]:
    """Add the columns and rows of phase 0, the forward, or 1, the backward; return those of each class, with its count."""
    if regions_ahead(sharding.joined.travel):
        return []
    found = []
    for region_class in problem.program.classes:
        trips = list(_trips(sharding, region_class, phase))
        if trips:
            moments = _moments(problem, sharding, region_class, phase)
            if has_links(problem):
                moments += [(trip.place, trip.column, trip.late) for trip in trips]
            exchanges = list(_late_exchanges(problem, sharding, region_class)) if phase else []
            waits = _waits(model, trips, moments, exchanges, _buffers(trips) if phase else {})
            found.append((waits, region_class.multiplicity))
    return found


def _waits(
    model: Model, trips: Sequence[_Trip], moments: Sequence[_Moment], exchanges: Sequence[_Exchange],
    buffers: Mapping[Any, Sequence[_Trip]],
) -> Waits:  # fmt: skip
    waits, one = Waits(model.column()), model.one()
    for link in dict.fromkeys(trip.leg.link for trip in trips):
        taken = [trip for trip in trips if trip.leg.link == link]
        keys = [key for key in dict.fromkeys(trip.key for trip in taken) if key in buffers]
        together = {key: waits.add_travelling(model, _seconds(buffers[key])) for key in keys}
        sooner: dict[Any, Terms] = defaultdict(list)
        for place, computed in _computed(model, waits, one, taken, moments, exchanges):
            here = [trip for trip in taken if trip.place == place]
            for key in dict.fromkeys(trip.key for trip in here):
                added = _seconds(trip for trip in here if trip.key == key)
                sooner[key] = [(waits.add_travelling(model, [*sooner[key], *added]), 1.0)]
            for latency in _latencies(here):
                waits.add_floor(model, WAITS, [*chain.from_iterable(sooner.values()), *latency, (computed, -1.0)])
            for key in dict.fromkeys(trip.key for trip in here if trip.key in buffers):
                others = [term for other, terms in sooner.items() if other != key for term in terms]
                for leaving in _leaving(buffers[key], together[key], place, one):
                    waits.add_floor(model, WAITS, [*leaving, *others, (computed, -1.0)])
    return waits


def add_sum_waits(model: Model, problem: Problem, sharding: Sharding) -> Iterator[tuple[Waits, int]]:
    """Add the columns and rows of the gradients that stay whole; yield those of each collective, with the link that it takes."""
    by_key: dict[Any, list[_Trip]] = defaultdict(list)
    for leg, served, column, count in sharding.joined.sums:
        by_key[leg.join and leg.join.key].append(
            _Trip(_first_place(problem, served), _served(sharding, served), column, leg, problem.unit_s, count)
        )
    behind = _behind(problem, sharding)
    share = last_buffer_share(sum(decision.count * max(decision.rest_bytes) for decision in problem.params))
    for trips in by_key.values():
        waits, one = Waits(model.column()), model.one()
        serving = _serving(sharding, trips, one)
        together = waits.add_travelling(model, [(trip.column, share * trip.early) for trip in trips])
        for place, computed in _computed(model, waits, one, trips, *behind):
            for leaving in _leaving(trips, together, place, one, share, serving):
                waits.add_floor(model, WAITS, [*leaving, (computed, -1.0)])
        yield waits, trips[0].leg.link


def _serving(sharding: Sharding, trips: Sequence[_Trip], one: int) -> dict[Any, Terms]:
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


def _computed(
    model: Model, waits: Waits, one: int, trips: Sequence[_Trip], moments: Sequence[_Moment],
    exchanges: Sequence[_Exchange],
) -> Iterator[tuple[_Place, int]]:  # fmt: skip
    """Yield each place where a trip over one link is read, with its column K; of a whole step, those near its end."""
    places = {trip.place for trip in trips if trip.place[0] < NEAR_END}
    most = _most(trips, lambda trip: trip.early + trip.latency)
    stops: dict[tuple[_Place, bool], list[Terms]] = defaultdict(list)
    for exchange in exchanges:
        if trips[0].leg.link in exchange.links and any(exchange.place <= place for place in places):
            terms = [(one, most), *((column, -most) for column in exchange.columns)]
            stops[exchange.place, exchange.is_behind].append(terms)
    begin = (-1, 0)
    before: Terms = []
    for place in sorted({*places, *(place for place, _ in stops)}):
        sums: dict[int, float] = defaultdict(float)
        for moment, column, seconds in moments:
            if begin <= moment < place:
                sums[column] += seconds
        computed = waits.add_computed(model, [*before, *sums.items()], *stops[place, True])
        if place in places:
            yield place, computed
        if stops[place, False]:
            computed = waits.add_computed(model, [(computed, 1.0)], *stops[place, False])
        begin, before = place, [(computed, 1.0)]


def _leaving(
    trips: Sequence[_Trip], together: int, place: _Place, one: int, share: float = 1.0,
    serving: Mapping[Any, Terms] | None = None,
) -> Iterator[Terms]:  # fmt: skip
    """Yield, for each copy that is read at `place`, what leaves no sooner than its gradient, if it is chosen.

    together: the column of the share of all that leaves. serving: the terms that are 1, beside those of its own, where a copy is
    one that serves several regions.
    """
    latency = max(trip.latency for trip in trips)
    most = latency + _most(trips, lambda trip: share * trip.early)
    for served in dict.fromkeys(trip.served for trip in trips if trip.place == place):
        chosen = [*((trip.column, 1.0) for trip in trips if trip.served == served), *(serving or {}).get(served, [])]
        yield [(together, 1.0), *((column, most * weight) for column, weight in chosen), (one, latency - most)]


def _most(trips: Sequence[_Trip], amount: Callable[[_Trip], float]) -> float:
    """Return the most that trips amount to, where each copy is served from one layout."""
    most: dict[Any, float] = defaultdict(float)
    for trip in trips:
        most[trip.served] = max(most[trip.served], amount(trip))
    return sum(most.values())


def _trips(sharding: Sharding, region_class: RegionClass, phase: int) -> Iterator[_Trip]:
    """Yield what travels early of parameters that every region of the class reads."""
    for use, served, column, way in sharding.joined.within:
        leg = (way.there, way.back)[phase]
        is_each = use.region_class is region_class and use.count == region_class.multiplicity
        if is_each and leg.early and not leg.is_whole_sum:
            place = (0, _position(use, served[1]))
            yield _Trip(place, _served(sharding, served), column, leg, sharding.joined.problem.unit_s)


def _served(sharding: Sharding, served: tuple[Any, Want]) -> Any:
    """Return what has one copy at most: a reader that asks for one, whichever that is, or else one copy that a reader asks for."""
    reader, _ = served
    is_one = isinstance(reader, Use) and has_one_want(reader)
    return reader if is_one and all(reader.source is not tied.source for tied in sharding.tied) else served


def _first_place(problem: Problem, served: tuple[Any, Want]) -> _Place:
    """Return where a step first reads a copy.

    One copy of several regions is read by two at least: the last but one of those places, as E is no more than is waited.
    """
    reader, want = served
    if isinstance(reader, Use):
        return reader.region_class.members[reader.members[0]].index, _position(reader, want)
    uses = [
        use for use in problem.uses if use.source is reader and any(want in w for d in use.demands for w in d.wants)
    ]
    return sorted(_first_place(problem, (use, want)) for use in uses)[-2:][0]


def _position(use: Use, want: Want) -> int:
    """Return where a region first reads a copy; where that is a choice, the last such place, as E is no more than is waited."""
    return max(_positions(use, want))


def _positions(use: Use, want: Want) -> list[int]:
    """Return the positions of the groups that may want a copy."""
    readers = [demand.decision.group for demand in use.demands if any(want in wants for wants in demand.wants)]
    return [min(op.position for op in group.ops if use.tensor in op.inputs) for group in readers if group]


def has_links(problem: Problem) -> bool:
    """Tell whether collectives over one link run beside those over another."""
    return len(set(problem.costs.links)) > 1


def _moments(problem: Problem, sharding: Sharding, region_class: RegionClass, phase: int) -> list[_Moment]:
    """Return what hides a collective within a region."""
    costs = problem.costs
    found: list[_Moment] = []
    for decision in problem.of_class(region_class):
        assert decision.group is not None
        for split, column in zip(decision.options, sharding.choice[decision]):
            for op in decision.group.ops:
                seconds = costs.op_s(decision.group, op, split)[phase]
                exchanged_s = costs.inner_s(decision.group, op, split)[phase] if has_links(problem) else 0.0
                found.append(((0, op.position), column, (seconds + exchanged_s) / problem.unit_s))
    if has_links(problem):
        reshards = _reshards(problem, sharding, region_class, phase)
        found += [
            ((0, _position(use, want)), column, took_s / problem.unit_s) for (use, _, want), column, took_s in reshards
        ]
    return found


def _reshards(
    problem: Problem, sharding: Sharding, region_class: RegionClass, phase: int
) -> Iterator[tuple[tuple[Use, Layout, Want], int, float]]:
    """Yield the reshards of activations that take time, each with the column that chooses it and its seconds."""
    for key, column in sharding.flow.items():
        if key[0].region_class is region_class and not key[0].source.is_param:
            seconds = flow_s(problem, *key)[phase]
            if seconds:
                yield key, column, seconds


def _late_exchanges(problem: Problem, sharding: Sharding, region_class: RegionClass) -> Iterator[_Exchange]:
    """Yield the exchanges in the backward of a region: reshards of activations, and those inside of ops."""
    links = problem.costs.links
    found: dict[Any, list[int]] = defaultdict(list)
    for (use, native, want), column, _ in _reshards(problem, sharding, region_class, 1):
        steps = transition(want[1], gradient_layout(native))
        taken = frozenset(links[step.axis] for step in steps if step.kind != "slice")
        found[min(_positions(use, want)), _served(sharding, (use, want)), taken].append(column)
    for (position, _, taken), columns in found.items():
        yield _Exchange((0, position), True, taken, tuple(columns))
    for decision in problem.of_class(region_class):
        assert decision.group is not None
        for op in decision.group.ops:
            inner = [problem.costs.inner_s(decision.group, op, split)[1] for split in decision.options]
            chosen = tuple(column for column, took_s in zip(sharding.choice[decision], inner) if took_s)
            if chosen:
                yield _Exchange((0, op.position), False, frozenset(links), chosen)


def _behind(problem: Problem, sharding: Sharding) -> tuple[list[_Moment], list[_Exchange]]:
    """Return what runs near the end of the backward."""
    moments: list[_Moment] = []
    exchanges: list[_Exchange] = []
    for region in problem.program.regions[:NEAR_END]:
        for (_, position), column, seconds in _moments(problem, sharding, region.region_class, 1):
            moments.append(((region.index, position), column, seconds))
        for exchange in _late_exchanges(problem, sharding, region.region_class):
            exchanges.append(replace(exchange, place=(region.index, exchange.place[1])))
    return moments, exchanges


def _buffers(trips: Sequence[_Trip]) -> dict[Any, list[_Trip]]:
    """Return by its key what is reduced in one buffer; what may fill several is not among it."""
    found: dict[Any, list[_Trip]] = defaultdict(list)
    for trip in trips:
        if trip.key is not None:
            found[trip.key].append(trip)
    return {key: trips for key, trips in found.items() if _most(trips, lambda trip: trip.buffer_share) <= 1.0}


def _latencies(here: Iterable[_Trip]) -> Iterable[Terms]:
    """Return the latency of each copy that joins a collective: of several, the first may have paid that of all."""
    found: dict[Any, Terms] = defaultdict(list)
    for trip in here:
        found[trip.key and trip.served].append((trip.column, trip.latency))
    return found.values()


def _seconds(trips: Iterable[_Trip]) -> Terms:
    return [(trip.column, trip.early) for trip in trips]
