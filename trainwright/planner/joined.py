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

from ..capture.layout import Layout
from ..capture.transition import Step, gradient_layout, transition
from ..capture.travel import BUFFER_BYTES, Overlap, Travel, issued_step, last_buffer_share, shared_buffer_bytes
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


def travel_of(problem: Problem, use: Use, native: Layout, want: Want) -> Travel:
    """Return how a parameter travels that rests in `native` and is wanted as `want` says."""
    tensor = use.source.tensor
    back = transition(want[1], gradient_layout(native)) if use.tensor.requires_grad else ()
    return Travel(transition(native, want[0]), back, problem.costs.local_bytes(tensor, want[0]), tensor.dtype)


def _there(problem: Problem, use: Use, travel: Travel, hides: float) -> Iterator[Join]:
    if travel.gather_key is not None:
        latency_s = problem.costs.latency_s(travel.there, use.source.tensor.slots)
        yield Join((_GATHER, use.region_class, *travel.gather_key), use.count, latency_s, 0.0, hides)


def _back(problem: Problem, use: Use, travel: Travel, hides: float) -> Iterator[Join]:
    if travel.reduction_key is None or travel.fills_buffer:
        return
    latency_s = problem.costs.latency_s(travel.back, use.source.tensor.slots)
    if travel.is_whole_sum:
        share = use.count * travel.num_bytes / shared_buffer_bytes(_region_bytes(use))
        yield Join(travel.reduction_key, 1, latency_s / problem.costs.num_runs, share, hides)
    else:
        share = travel.num_bytes / BUFFER_BYTES
        yield Join((use.region_class, *travel.reduction_key), use.count, latency_s, share, hides)


def _region_bytes(use: Use) -> int:
    """Return the bytes of the parameters that one region of the use's class reads."""
    return sum(tensor.num_bytes for tensor in use.region_class.representative.externals if tensor.role == "param")


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
        travel = travel_of(self.problem, use, native, want)
        hides_there = 0.0 if self._is_first(use.region_class) else self._issued(use, travel.there)
        hides_back = self._hides_back(use, travel)
        there = tuple(_there(self.problem, use, travel, hides_there))
        back = tuple(_back(self.problem, use, travel, hides_back))
        there_s, back_s = (_without(each, found) for each, found in zip(times, (there, back)))
        return Way((*there, *back), there_s, back_s, (hides_there, hides_back))

    def _hides_back(self, use: Use, travel: Travel) -> float:
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
        """Of the gradients that stay whole, the share of the last buffer, behind which nothing is left to compute."""
        return last_buffer_share(sum(decision.count * max(decision.rest_bytes) for decision in self.problem.params))

    def again(self, use: Use, native: Layout, want: Want, seconds: float) -> Way:
        """Return the same of a copy that the backward of one instance makes again."""
        if not self.in_buckets or not use.source.is_param:
            return Way((), 0.0, seconds)
        there = _there(self.problem, use, travel_of(self.problem, use, native, want), 0.0)
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
