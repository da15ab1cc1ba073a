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
from typing import Any

from ..capture import buckets
from ..capture.layout import Layout
from ..capture.schedule import Overlap
from ..capture.transition import Step, gradient_layout, transition
from .milp import Model
from .problem import Problem, Use, Want

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


def way_back(native: Layout, want: Want) -> tuple[Step, ...]:
    """Return the steps that bring a gradient back from where it is wanted to where its parameter rests."""
    return transition(want[1], gradient_layout(native))


def is_whole_sum(steps: Sequence[Step], native: Layout, want: Want) -> bool:
    """Whether a parameter is read as it rests and its gradient only summed: all such gradients are one bucket."""
    return buckets.only_sums(steps) and native == want[0]


def _there(problem: Problem, use: Use, native: Layout, wanted: Layout) -> Iterator[Join]:
    tensor, costs = use.source.tensor, problem.costs
    steps = transition(native, wanted)
    if buckets.is_small_gather(steps, costs.local_bytes(tensor, wanted)):
        key = (_GATHER, use.region_class, steps[0].axis, tensor.dtype)
        yield Join(key, use.count, costs.latency_s(steps, tensor.slots), 0.0)


def _back(problem: Problem, use: Use, native: Layout, want: Want) -> Iterator[Join]:
    tensor, costs = use.source.tensor, problem.costs
    steps = way_back(native, want)
    kinds, num_bytes = buckets.joined_kinds(steps), costs.local_bytes(tensor, want[0])
    if kinds is None or num_bytes >= buckets.BUFFER_BYTES:
        return
    latency_s = costs.latency_s(steps, tensor.slots)
    if is_whole_sum(steps, native, want):
        key: tuple[Any, ...] = (kinds, tensor.dtype)
        yield Join(key, 1, latency_s / costs.num_runs, use.count * num_bytes / max(1, buckets.ENOUGH_BYTES))
    else:
        yield Join((kinds, use.region_class, tensor.dtype), use.count, latency_s, num_bytes / buckets.BUFFER_BYTES)


@dataclass(frozen=True)
class Way:
    """One change of layout of a parameter, there and back: what it travels with, and its seconds without shared latencies."""

    joining: tuple[Join, ...]
    there_s: float
    back_s: float
    exposed: bool
    """Nothing is computed before it is there, or after it is on its way back."""

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
            return Way((), *times, exposed=True)
        there = tuple(_there(self.problem, use, native, want[0]))
        back = tuple(_back(self.problem, use, native, want)) if use.tensor.requires_grad else ()
        there_s, back_s = (_without(each, found) for each, found in zip(times, (there, back)))
        return Way((*there, *back), there_s, back_s, exposed=self._is_first(use.region_class))

    def again(self, use: Use, native: Layout, want: Want, seconds: float) -> Way:
        """Return the same of a copy that the backward of one instance makes again."""
        if not self.in_buckets or not use.source.is_param:
            return Way((), 0.0, seconds, exposed=True)
        there = _there(self.problem, use, native, want[0])
        joining = tuple(replace(join, key=(_AGAIN, *join.key), count=1) for join in there)
        return Way(joining, 0.0, _without(seconds, joining), exposed=True)

    def add(self, way: Way, served: tuple[Any, Want], column: int, count: int = 1) -> None:
        """Note that what `column` says, one of the ways to have `served`, goes this way, so many times a step."""
        if not way.exposed:
            self.travelling[column] = (count * way.there_s, count * way.back_s)
        for join in way.joining:
            self.found[join.key].setdefault(served, []).append((join, column))

    def write(self, model: Model) -> None:
        """Add the columns of how many collectives there are of what was noted since the last time, and their rows."""
        for key, served in self.found.items():
            members = [member for ways in served.values() for member in ways]
            seconds = max(join.count for join, _ in members) * members[0][0].latency_s
            num = model.column(cost=seconds)
            if key[0] != _AGAIN and not any(self._is_first(part) for part in key):
                self.travelling[num] = (seconds, 0.0) if key[0] == _GATHER else (0.0, seconds)
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
