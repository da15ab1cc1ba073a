"""Columns and rows of shared latency: reshards of parameters that join one collective pay its latency once.

    N[b] ≥ Σ f                         f: the reshards that may serve one reader by joining b; one of them is chosen
    N[b] ≥ Σ bytes / buffer · f        the reshards that are chosen fill so many buffers
    N[b] ≥ Σ C                         C: in so many instances the backward gathers that copy again
    seconds  Σ count · latency · N[b]  and of each f and C the seconds without latency

b stands for a collective along given axes, of one type (`rank.travel`): the small parameters that a region gathers, or gathers
again; the gradients that a region scatters; or all gradients that stay whole.

`bucket_memory` says what buckets hold, `hidden` how much of them computation hides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...program.decisions import Overlap
from ...program.layout import Layout
from ...program.transition import Step, gradient_layout, transition
from ...rank.travel import BUFFER_BYTES, Travel, issued_step, last_buffer_share, shared_buffer_bytes
from ..problem.problem import Problem, Source, Use, Want
from .milp import Model

TOGETHER = "what travels together pays one latency"
_GATHER, _AGAIN = "gather", "again"


@dataclass(frozen=True)
class Join:
    """The part of one reshard in a collective that it joins."""

    key: tuple[Any, ...]
    count: int
    """The number of such collectives in a step."""
    latency_s: float
    share: float
    """The share of a buffer that the reshard fills."""
    early_fraction: float = 0.0
    """The share of the latency that is issued before it is waited for."""


def travel_of(problem: Problem, use: Use, native: Layout, want: Want) -> Travel:
    """Return how a parameter travels that rests in `native` and is wanted as `want` says."""
    tensor = use.source.tensor
    back = transition(want[1], gradient_layout(native)) if use.tensor.requires_grad else ()
    return Travel(transition(native, want[0]), back, problem.costs.local_bytes(tensor, want[0]), tensor.dtype)


def _there(problem: Problem, use: Use, travel: Travel, early: float) -> Iterator[Join]:
    if travel.gather_key is not None:
        latency_s = problem.costs.latency_s(travel.there, use.source.tensor.slots)
        yield Join((_GATHER, use.region_class, *travel.gather_key), use.count, latency_s, 0.0, early)


def _back(problem: Problem, use: Use, travel: Travel, early: float) -> Iterator[Join]:
    if travel.reduction_key is None or travel.fills_buffer:
        return
    latency_s = problem.costs.latency_s(travel.back, use.source.tensor.slots)
    if travel.is_whole_sum:
        share = use.count * travel.num_bytes / shared_buffer_bytes(_region_bytes(use))
        yield Join(travel.reduction_key, 1, latency_s / problem.costs.num_runs, share, early)
    else:
        share = travel.num_bytes / BUFFER_BYTES
        yield Join((use.region_class, *travel.reduction_key), use.count, latency_s, share, early)


def _region_bytes(use: Use) -> int:
    """Return the bytes of the parameters that one region of the use's class reads."""
    return sum(tensor.num_bytes for tensor in use.region_class.representative.externals if tensor.role == "param")


@dataclass(frozen=True)
class Way:
    """One reshard of a parameter, there and back: the collectives that it joins, and its seconds without their latency."""

    joining: tuple[Join, ...]
    there_s: float
    back_s: float
    early_fractions: tuple[float, float] = (0.0, 0.0)
    """The shares of the seconds there and back that are issued before they are waited for."""

    @property
    def seconds(self) -> float:
        """Return those of both directions."""
        return self.there_s + self.back_s


@dataclass(eq=False)
class Joined:
    """The reshards of parameters, by the collective that they join; none where parameters travel one by one."""

    problem: Problem
    travel: Overlap
    found: dict[tuple[Any, ...], dict[Any, list[tuple[Join, int]]]] = field(default_factory=lambda: defaultdict(dict))
    """The reshards that `write` has yet to write, by the collective and the reader that they may serve."""
    shareable_s: float = 0.0
    """The most that all latencies would take if none were shared."""
    travelling: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By column, the seconds that computation may hide: in the forward, in the backward."""

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
            return Way((), *times)
        travel = travel_of(self.problem, use, native, want)
        early_there = 0.0 if self._is_first(use.region_class) else self._issued(use, travel.there)
        early_back = self._early_back(use, travel)
        there = tuple(_there(self.problem, use, travel, early_there))
        back = tuple(_back(self.problem, use, travel, early_back))
        there_s, back_s = (_without(each, found) for each, found in zip(times, (there, back)))
        return Way((*there, *back), there_s, back_s, (early_there, early_back))

    def _early_back(self, use: Use, travel: Travel) -> float:
        """Return the share of a gradient's way back that is issued while there is something left to compute."""
        issued = self._issued(use, travel.back)
        if travel.is_whole_sum:
            # one bucket for all: a gradient is there when the last reader's backward is done, the last buffer at the end
            return 0.0 if use.source in self._read_first else issued * (1 - self._last_share)
        return 0.0 if self._is_first(use.region_class) else issued

    def _issued(self, use: Use, steps: Sequence[Step]) -> float:
        """Return the share of the seconds of a way that is under way while something else is done (`travel.issued_step`)."""
        number = issued_step(steps)
        if number is None:
            return 0.0
        tensor, costs = use.source.tensor, self.problem.costs
        seconds = [costs.step_s(step, tensor.slots, tensor.dtype.itemsize) for step in steps]
        return seconds[number] / sum(seconds)

    @cached_property
    def _read_first(self) -> frozenset[Source]:
        """The parameters that the region reads with which a step begins."""
        return frozenset(use.source for use in self.problem.uses if self._is_first(use.region_class))

    @cached_property
    def _last_share(self) -> float:
        """Return the last buffer's share of the gradients that stay whole; nothing is left to compute behind it."""
        return last_buffer_share(sum(decision.count * max(decision.rest_bytes) for decision in self.problem.params))

    def again(self, use: Use, native: Layout, want: Want, seconds: float) -> Way:
        """Return how the gather that one instance's backward repeats travels with others."""
        if not self.in_buckets or not use.source.is_param:
            return Way((), 0.0, seconds)
        there = _there(self.problem, use, travel_of(self.problem, use, native, want), 0.0)
        joining = tuple(replace(join, key=(_AGAIN, *join.key), count=1) for join in there)
        return Way(joining, 0.0, _without(seconds, joining))

    def add(self, way: Way, served: tuple[Any, Want], column: int, count: int = 1) -> None:
        """Note that `column`, one of the ways to serve a reader, chooses this reshard, so many times a step."""
        if any(way.early_fractions):
            self.travelling[column] = (
                count * way.early_fractions[0] * way.there_s,
                count * way.early_fractions[1] * way.back_s,
            )
        for join in way.joining:
            self.found[join.key].setdefault(served, []).append((join, column))

    def write(self, model: Model) -> None:
        """Add a column with the number of collectives, and its rows, for all reshards noted since the last call."""
        for key, served in self.found.items():
            members = [member for ways in served.values() for member in ways]
            seconds = max(join.count for join, _ in members) * members[0][0].latency_s
            num = model.column(cost=seconds)
            hidden_s = seconds * max(join.early_fraction for join, _ in members)
            if hidden_s:
                self.travelling[num] = (hidden_s, 0.0) if key[0] == _GATHER else (0.0, hidden_s)
            for ways in served.values():
                model.row(TOGETHER, [(num, 1.0), *((column, -1.0) for _, column in ways)], lower=0.0)
                self.shareable_s += max(join.count * join.latency_s for join, _ in ways)
            shares = [(column, -join.share) for join, column in members if join.share]
            if shares:
                model.row(TOGETHER, [(num, 1.0), *shares], lower=0.0)
        self.found.clear()

    def _is_first(self, part: Any) -> bool:
        """Tell whether this is the class of the region that a step begins with, and its backward ends with."""
        first = self.problem.program.regions[0].region_class
        return part is first and first.multiplicity == 1


def _without(seconds: float, joining: tuple[Join, ...]) -> float:
    """Return the seconds of a reshard without the latencies that it shares."""
    return max(0.0, seconds - sum(join.latency_s for join in joining))
