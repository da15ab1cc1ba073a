"""Columns and rows of shared latency: reshards of parameters that join one collective pay its latency once.

    N[b] ≥ Σ f                         f: the reshards that may serve one reader by joining b; one of them is chosen
    N[b] ≥ Σ bytes / buffer · f        the reshards that are chosen fill so many buffers
    N[b] ≥ Σ C                         C: in so many instances the backward gathers that copy again
    seconds  Σ count · latency · N[b]  and of each f and C the seconds without latency

b stands for a collective along given axes, of one type (`rank.travel`): the small parameters that a region gathers, or gathers
again; the gradients that a region scatters; or all gradients that stay whole.

`bucket_memory` says what buckets hold, `hidden` how much of them computation hides, `arrivals` how much within a region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from ...program.blocks import RegionClass
from ...program.decisions import Overlap
from ...program.layout import Layout
from ...program.transition import ReshardStep, gradient_layout, transition
from ...rank.travel import BUFFER_BYTES, Travel, issued_step, shared_buffer_bytes
from ..problem.problem import Problem, Use, Want
from .milp import Model, Terms

TOGETHER = "what travels together pays one latency"
_GATHER, _AGAIN = "gather", "again"


Travelling = dict[int, Terms]
"""By link, the seconds that columns choose."""


@dataclass(frozen=True)
class Join:
    """The part of one reshard in a collective that it joins."""

    key: tuple[Any, ...]
    count: int
    """The number of such collectives in a step."""
    latency_s: float
    share: float
    """The share of a buffer that the reshard fills."""


def travel_of(problem: Problem, use: Use, native: Layout, want: Want) -> Travel:
    """Return how a parameter travels that rests in `native` and is wanted as `want` says."""
    tensor = use.source.tensor
    back = transition(want[1], gradient_layout(native)) if use.tensor.requires_grad else ()
    return Travel(transition(native, want[0]), back, problem.costs.local_bytes(tensor, want[0]), tensor.dtype)


def _there(problem: Problem, use: Use, travel: Travel) -> Join | None:
    if travel.gather_key is None:
        return None
    latency_s = problem.costs.latency_s(travel.there, use.source.tensor.slots)
    return Join((_GATHER, use.region_class, *travel.gather_key), use.count, latency_s, 0.0)


def _back(problem: Problem, use: Use, travel: Travel) -> Join | None:
    if travel.reduction_key is None or travel.fills_buffer:
        return None
    latency_s = problem.costs.latency_s(travel.back, use.source.tensor.slots)
    if travel.is_whole_sum:
        share = use.count * travel.num_bytes / shared_buffer_bytes(_region_bytes(use))
        return Join(travel.reduction_key, 1, latency_s / problem.costs.num_runs, share)
    return Join((use.region_class, *travel.reduction_key), use.count, latency_s, travel.num_bytes / BUFFER_BYTES)


def _region_bytes(use: Use) -> int:
    """Return the bytes of the parameters that one region of the use's class reads."""
    return sum(tensor.num_bytes for tensor in use.region_class.representative.externals if tensor.role == "param")


@dataclass(frozen=True)
class Leg:
    """One direction of a parameter's reshard."""

    seconds: float
    """Those of one reshard, without the latency that it shares."""
    join: Join | None = None
    """The collective that it joins."""
    early: float = 0.0
    """The share of the seconds, and of the latency, that is issued before it is waited for."""
    link: int = -1
    """The link over which that goes."""
    late_links: frozenset[int] = frozenset()
    """The links over which the rest goes."""
    lead: float = 0.0
    """The share of the rest that is copied before it takes a link."""
    is_whole_sum: bool = False

    @property
    def early_s(self) -> float:
        """Return the seconds of what is issued before it is waited for."""
        return self.early * self.seconds

    @property
    def late_s(self) -> float:
        """Return the seconds of what runs when it is waited for."""
        return (1 - self.early) * self.seconds


@dataclass(frozen=True)
class Way:
    """One reshard of a parameter, there and back."""

    there: Leg
    back: Leg

    @property
    def seconds(self) -> float:
        """Return those of both directions."""
        return self.there.seconds + self.back.seconds


@dataclass(eq=False)
class Joined:
    """The reshards of parameters, by the collective that they join; none where parameters travel one by one."""

    problem: Problem
    travel: Overlap
    found: dict[tuple[Any, ...], dict[Any, list[tuple[Leg, Join, int]]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """The reshards that `write` has yet to write, by the collective and the reader that they may serve."""
    shareable_s: float = 0.0
    """The most that all latencies would take if none were shared."""
    travelling: tuple[Travelling, Travelling] = field(default_factory=lambda: ({}, {}))
    """The seconds that computation may hide, as terms by link: in the forward, in the backward."""
    within: list[tuple[Use, tuple[Any, Want], int, Way]] = field(default_factory=list)
    """The reshards that begin and end in the region of a use: whom each serves, the column that chooses it, and how it travels."""
    sums: list[tuple[Leg, tuple[Any, Want], int, int]] = field(default_factory=list)
    """The gradients that stay whole: how they travel, whom the copy serves, the column that chooses it, and their number."""

    @property
    def in_buckets(self) -> bool:
        """True if parameters travel in buckets, and hence share latencies."""
        return self.travel != "none"

    @property
    def is_weak(self) -> bool:
        """True if counted latencies and hidden seconds weaken the relaxation; long programs price the latter."""
        return self.in_buckets and not self.problem.is_long

    def of(self, use: Use, native: Layout, want: Want, times: tuple[float, float]) -> Way:
        """Return how a reshard that takes `times` (there, back) by itself travels with others."""
        if not self.in_buckets or not use.source.is_param:
            return Way(Leg(times[0]), Leg(times[1]))
        travel = travel_of(self.problem, use, native, want)
        there = self._leg(use, travel.there, times[0], _there(self.problem, use, travel))
        back = self._leg(use, travel.back, times[1], _back(self.problem, use, travel))
        if travel.is_whole_sum:
            back = replace(back, is_whole_sum=True)
        return Way(there, back)

    def _leg(self, use: Use, steps: Sequence[ReshardStep], seconds: float, join: Join | None) -> Leg:
        """Return the leg that takes `seconds` by itself; what it issues early, `travel.issued_step` says."""
        rest_s, number = _without(seconds, join), issued_step(steps)
        tensor, costs = use.source.tensor, self.problem.costs
        by_step = [costs.step_s(step, tensor.slots, tensor.dtype.itemsize) for step in steps]
        links = [None if step.kind == "slice" else costs.links[step.axis] for step in steps]
        late = [(link, step_s) for place, (link, step_s) in enumerate(zip(links, by_step)) if place != number]
        late_links = frozenset(link for link, _ in late if link is not None)
        copied_s = sum(step_s for _, step_s in takewhile(lambda each: each[0] is None, late))
        lead = copied_s / sum(step_s for _, step_s in late) if copied_s else 0.0
        if number is None:
            return Leg(rest_s, join, late_links=late_links, lead=lead)
        link = links[number]
        assert link is not None, "a slice is not issued early"
        return Leg(rest_s, join, by_step[number] / sum(by_step), link, late_links, lead)

    def again(self, use: Use, native: Layout, want: Want, seconds: float) -> Leg:
        """Return how the gather that one instance's backward repeats travels with others."""
        if not self.in_buckets or not use.source.is_param:
            return Leg(seconds)
        join = _there(self.problem, use, travel_of(self.problem, use, native, want))
        return Leg(_without(seconds, join), join and replace(join, key=(_AGAIN, *join.key), count=1))

    def add(self, way: Way, served: tuple[Any, Want], column: int, count: int = 1, use: Use | None = None) -> None:
        """Note that `column`, one of the ways to serve a reader, chooses this reshard, so many times a step.

        use: the one in whose region the copy is gathered, and its gradient reduced, where no choice decides that.
        """
        for leg, travelling in zip((way.there, way.back), self.travelling):
            self.add_leg(leg, served, column)
            if leg.early_s:
                travelling.setdefault(leg.link, []).append((column, count * leg.early_s))
            if leg.is_whole_sum:
                self.sums.append((leg, served, column, count))
        if use is not None:
            self.within.append((use, served, column, way))

    def add_leg(self, leg: Leg, served: tuple[Any, Want], column: int) -> None:
        """Note that `column` chooses a reshard in one direction."""
        if leg.join is not None:
            self.found[leg.join.key].setdefault(served, []).append((leg, leg.join, column))

    def write(self, model: Model) -> None:
        """Add a column with the number of collectives, and its rows, for all reshards noted since the last call."""
        for key, served in self.found.items():
            members = [member for ways in served.values() for member in ways]
            seconds = max(join.count for _, join, _ in members) * members[0][1].latency_s
            num = model.column(cost=seconds)
            if early := max(leg.early for leg, _, _ in members):
                travelling = self.travelling[key[0] != _GATHER]
                travelling.setdefault(members[0][0].link, []).append((num, early * seconds))
            for ways in served.values():
                model.row(TOGETHER, [(num, 1.0), *((column, -1.0) for _, _, column in ways)], lower=0.0)
                self.shareable_s += max(join.count * join.latency_s for _, join, _ in ways)
            shares = [(column, -join.share) for _, join, column in members if join.share]
            if shares:
                model.row(TOGETHER, [(num, 1.0), *shares], lower=0.0)
        self.found.clear()

    def is_first(self, region_class: RegionClass) -> bool:
        """Tell whether this is the class of the region that a step begins with, and its backward ends with."""
        first = self.problem.program.regions[0].region_class
        return region_class is first and first.multiplicity == 1


def _without(seconds: float, join: Join | None) -> float:
    """Return the seconds of a reshard without the latency that it shares."""
    return max(0.0, seconds - (join.latency_s if join else 0.0))
