"""Latency that parameters share: what travels in one bucket (`capture.buckets`) pays it once for all, not each for itself.

    N[b] ≥ Σ f                        of the changes of layout that serve one want of one use by joining b: one of them does
    N[b] ≥ Σ bytes / buffer · f       so many buffers do they fill
    seconds  Σ count · latency · N[b]  and of each f what is left without latency

b is a collective along the same axes, of one type: of small parameters that a region gathers, of gradients that a region
scatters, or of all gradients that stay whole.

Only the search that no memory binds counts so. What buckets hold is in no row, so within a budget that binds parameters are
taken to travel one by one, until the answer is tried with buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..capture import buckets
from ..capture.layout import Layout
from ..capture.transition import gradient_layout, transition
from .milp import Model
from .problem import Problem, Use, Want

TOGETHER = "what travels together pays one latency"


@dataclass(frozen=True)
class Join:
    """One change of layout's part in a collective."""

    key: tuple[Any, ...]
    count: int
    """How many such collectives a step has."""
    latency_s: float
    share: float
    """Of a buffer, what it fills."""


def joins(problem: Problem, use: Use, native: Layout, want: Want) -> Iterator[Join]:
    """Yield what a use's change of layout travels with, there and back; nothing for what is no parameter, or goes alone."""
    if use.source.is_param:
        yield from _there(problem, use, native, want[0])
        if use.tensor.requires_grad:
            yield from _back(problem, use, native, want)


def _there(problem: Problem, use: Use, native: Layout, wanted: Layout) -> Iterator[Join]:
    tensor, costs = use.source.tensor, problem.costs
    steps = () if native == wanted else transition(native, wanted)
    if buckets.is_small_gather(steps, costs.local_bytes(tensor, wanted)):
        key = ("gather", use.region_class, steps[0].axis, tensor.dtype)
        yield Join(key, use.count, costs.latency_s(steps, tensor.slots), 0.0)


def _back(problem: Problem, use: Use, native: Layout, want: Want) -> Iterator[Join]:
    tensor, costs = use.source.tensor, problem.costs
    steps = () if want[1] == gradient_layout(native) else transition(want[1], gradient_layout(native))
    kinds, num_bytes = buckets.joined_kinds(steps), costs.local_bytes(tensor, want[0])
    if kinds is None or num_bytes >= buckets.BUFFER_BYTES:
        return
    latency_s = costs.latency_s(steps, tensor.slots)
    if buckets.only_sums(steps) and native == want[0]:
        key: tuple[Any, ...] = (kinds, tensor.dtype)
        yield Join(key, 1, latency_s / costs.num_runs, use.count * num_bytes / max(1, buckets.ENOUGH_BYTES))
    else:
        yield Join((kinds, use.region_class, tensor.dtype), use.count, latency_s, num_bytes / buckets.BUFFER_BYTES)


@dataclass(eq=False)
class Joined:
    """The changes of layout of parameters, by what they travel in; nothing where they go one by one."""

    in_buckets: bool
    found: dict[tuple[Any, ...], dict[Any, list[tuple[Join, int]]]] = field(default_factory=lambda: defaultdict(dict))

    def of(self, problem: Problem, use: Use, native: Layout, want: Want, seconds: float) -> tuple[list[Join], float]:
        """Return what a change of layout of `seconds` travels with, and what is left of these without shared latencies."""
        joining = list(joins(problem, use, native, want)) if self.in_buckets else []
        return joining, max(0.0, seconds - sum(join.latency_s for join in joining))

    def add(self, joining: list[Join], served: tuple[Any, Want], column: int) -> None:
        """Note that what `column` says, one of the ways to have `served`, takes part in these."""
        for join in joining:
            self.found[join.key].setdefault(served, []).append((join, column))

    def write(self, model: Model) -> None:
        """Add the columns of how many collectives there are, and their rows."""
        for served in self.found.values():
            members = [member for ways in served.values() for member in ways]
            num = model.column(cost=max(join.count for join, _ in members) * members[0][0].latency_s)
            for ways in served.values():
                model.row(TOGETHER, [(num, 1.0), *((column, -1.0) for _, column in ways)], lower=0.0)
            shares = [(column, -join.share) for join, column in members if join.share]
            if shares:
                model.row(TOGETHER, [(num, 1.0), *shares], lower=0.0)
