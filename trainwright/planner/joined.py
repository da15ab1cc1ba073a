"""Latency that parameters share: what travels in one bucket (`capture.buckets`) pays it once for all, not each for itself.

    N[b] ≥ Σ f                        of the changes of layout that serve one want of one use by joining b: one of them does
    N[b] ≥ Σ bytes / buffer · f       so many buffers do they fill
    N[b] ≥ Σ C                        of the copies of one want that the backward makes again: in so many instances
    seconds  Σ count · latency · N[b]  and of each f and C what is left without latency

b is a collective along the same axes, of one type: of small parameters that a region gathers, or gathers again, of gradients
that a region scatters, or of all gradients that stay whole.

What buckets hold stands in `bucket_memory`, what computation hides of them in `hidden`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..capture import buckets
from ..capture.layout import Layout
from ..capture.reshard import issued_step
from ..capture.schedule import Overlap
from ..capture.transition import Step, gradient_layout, transition
from .milp import Model
from .problem import Problem, Source, Use, Want

TOGETHER = "what travels together pays one latency"
_GATHER, _AGAIN = "gather", "again"


@dataclass(frozen=True)
class Join:
    """One change of layout's part in a collective."""

    key: tuple[Any, ...]
    count: int
    """How many such collectives a step has."""
    latency_s: float
    share: float
    """Of a buffer, what it fills."""
    hides: float = 0.0
    """Of the latency, the share that is issued before it is waited for."""


def way_back(native: Layout, want: Want) -> tuple[Step, ...]:
    """Return the steps that bring a gradient back from where it is wanted to where its parameter rests."""
    return transition(want[1], gradient_layout(native))


def is_whole_sum(steps: Sequence[Step], native: Layout, want: Want) -> bool:
    """Whether a parameter is read as it rests and its gradient only summed: all such gradients are one bucket."""
    return buckets.only_sums(steps) and native == want[0]


def _there(problem: Problem, use: Use, steps: Sequence[Step], wanted: Layout, hides: float) -> Iterator[Join]:
    tensor, costs = use.source.tensor, problem.costs
    if buckets.is_small_gather(steps, costs.local_bytes(tensor, wanted)):
        key = (_GATHER, use.region_class, steps[0].axis, tensor.dtype)
        yield Join(key, use.count, costs.latency_s(steps, tensor.slots), 0.0, hides)


def _back(problem: Problem, use: Use, native: Layout, want: Want, hides: float) -> Iterator[Join]:
    tensor, costs = use.source.tensor, problem.costs
    steps = way_back(native, want)
    kinds, num_bytes = buckets.joined_kinds(steps), costs.local_bytes(tensor, want[0])
    if kinds is None or num_bytes >= buckets.BUFFER_BYTES:
        return
    latency_s = costs.latency_s(steps, tensor.slots)
    if is_whole_sum(steps, native, want):
        share = use.count * num_bytes / _whole_buffer_bytes(problem, use)
        yield Join((kinds, tensor.dtype), 1, latency_s / costs.num_runs, share, hides)
    else:
        share = num_bytes / buckets.BUFFER_BYTES
        yield Join((kinds, use.region_class, tensor.dtype), use.count, latency_s, share, hides)


def _whole_buffer_bytes(problem: Problem, use: Use) -> int:
    """Return what a buffer of gradients that stay whole holds: those of one region up to the most, of several up to enough."""
    region_bytes = sum(
        tensor.num_bytes for tensor in use.region_class.representative.externals if tensor.role == "param"
    )
    return max(1, min(buckets.BUFFER_BYTES, max(buckets.ENOUGH_BYTES, region_bytes)))


@dataclass(frozen=True)
class Way:
    """One change of layout of a parameter, there and back: what it travels with, and its seconds without shared latencies."""

    joining: tuple[Join, ...]
    there_s: float
    back_s: float
    hides: tuple[float, float] = (0.0, 0.0)
    """Of the seconds there and back, the share that is issued before it is waited for."""

    @property
    def seconds(self) -> float:
        """Return those of both directions."""
        return self.there_s + self.back_s


@dataclass(eq=False)
class Joined:
    """The changes of layout of parameters, by what they travel in; nothing where they go one by one."""

    problem: Problem
    travel: Overlap
    found: dict[tuple[Any, ...], dict[Any, list[tuple[Join, int]]]] = field(default_factory=lambda: defaultdict(dict))
    """Not written yet: by collective, by what is served, the ways to do so."""
    shareable_s: float = 0.0
    """What all would pay at most if none of them were shared."""
    travelling: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By column, the seconds that computation may hide: in the forward, in the backward."""

    @property
    def in_buckets(self) -> bool:
        """Whether anything is shared."""
        return self.travel != "none"

    @property
    def is_weak(self) -> bool:
        """Whether latencies and what is hidden make the relaxation weak; long programs have a price for the latter (`hidden`)."""
        return self.in_buckets and not self.problem.is_long

    def of(self, use: Use, native: Layout, want: Want, times: tuple[float, float]) -> Way:
        """Return what a change of layout of these seconds, there and back, travels with."""
        if not self.in_buckets or not use.source.is_param:
            return Way((), *times)
        steps = transition(native, want[0])
        hides_there = 0.0 if self._is_first(use.region_class) else self._issued(use, steps)
        there = tuple(_there(self.problem, use, steps, want[0], hides_there))
        back: tuple[Join, ...] = ()
        hides_back = 0.0
        if use.tensor.requires_grad:
            hides_back = self._hides_back(use, native, want)
            back = tuple(_back(self.problem, use, native, want, hides_back))
        there_s, back_s = (_without(each, found) for each, found in zip(times, (there, back)))
        return Way((*there, *back), there_s, back_s, (hides_there, hides_back))

    def _hides_back(self, use: Use, native: Layout, want: Want) -> float:
        """Return the share of a gradient's way back that is issued while there is something left to compute."""
        steps = way_back(native, want)
        if is_whole_sum(steps, native, want):
            # one bucket for all: a gradient is there when the last reader's backward is done, the last buffer at the end
            return 0.0 if use.source in self._read_first else self._issued(use, steps) * (1 - self._last_share)
        return 0.0 if self._is_first(use.region_class) else self._issued(use, steps)

    def _issued(self, use: Use, steps: Sequence[Step]) -> float:
        """Return the share of the seconds of a way that is under way while something else is done (`reshard.issued_step`)."""
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
        """Of the gradients that stay whole, the share of the last buffer, behind which nothing is left to compute."""
        total = sum(decision.count * max(decision.rest_bytes) for decision in self.problem.params)
        return min(1.0, buckets.ENOUGH_BYTES / max(1, total))

    def again(self, use: Use, native: Layout, want: Want, seconds: float) -> Way:
        """Return the same of a copy that the backward of one instance makes again."""
        if not self.in_buckets or not use.source.is_param:
            return Way((), 0.0, seconds)
        there = _there(self.problem, use, transition(native, want[0]), want[0], 0.0)
        joining = tuple(replace(join, key=(_AGAIN, *join.key), count=1) for join in there)
        return Way(joining, 0.0, _without(seconds, joining))

    def add(self, way: Way, served: tuple[Any, Want], column: int, count: int = 1) -> None:
        """Note that what `column` says, one of the ways to have `served`, goes this way, so many times a step."""
        if any(way.hides):
            self.travelling[column] = (count * way.hides[0] * way.there_s, count * way.hides[1] * way.back_s)
        for join in way.joining:
            self.found[join.key].setdefault(served, []).append((join, column))

    def write(self, model: Model) -> None:
        """Add the columns of how many collectives there are of what was noted since the last time, and their rows."""
        for key, served in self.found.items():
            members = [member for ways in served.values() for member in ways]
            seconds = max(join.count for join, _ in members) * members[0][0].latency_s
            num = model.column(cost=seconds)
            hidden_s = seconds * max(join.hides for join, _ in members)
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
    """What is left of the seconds of a change of layout without the latencies that are shared."""
    return max(0.0, seconds - sum(join.latency_s for join in joining))
