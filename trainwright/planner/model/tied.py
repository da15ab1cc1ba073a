"""Parameters that several regions read: one gathered copy for all of them, or one for each.

    f0[n, w]   the want w of all readers is served by one copy, made from the native layout n

It takes the place of f[u, n, w] of every reader u, and is paid once (`sharding`). What it holds, where F is the group that
reads first and L the one that reads last:

    forward    Σ f0 · bytes(w's forward layout)                       after F, to L
    backward   Σ f0 · (bytes(w's gradient layout) − bytes at rest)    before L, to F

since the gradient stays a sum that is not brought back until F's backward has added its part; at rest it counts from the
last reader on, whatever is chosen (`memory`). What the backward gathers again it does region by region in either case, from
the shard that is held.

A parameter that is read as it rests needs no copy, and its gradients are always brought back as one. A weight that all
blocks read is such a parameter too; weights of which each block has its own, read in two places, are not offered one copy.
A copy that several regions keep for their backward is one piece of memory; the rows count it once a region that keeps it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.blocks import RegionClass
from ...program.layout import Layout
from ...program.transition import gradient_layout
from ..problem.problem import Decision, Problem, Source, Use, Want
from .milp import MIB, Model, Terms

if TYPE_CHECKING:
    from .sharding import Sharding

RegionGroup = tuple[int, int]
"""A region and a group of it, in the order in which the forward runs."""
SHARED = "what one copy for several readers holds"


@dataclass(frozen=True, eq=False)
class Tied:
    """A parameter that several regions read."""

    source: Source
    uses: tuple[Use, ...]
    wants: tuple[Want, ...]
    """The wants that readers of two regions may have."""
    first: RegionGroup
    last: RegionGroup
    reader: Decision
    """The group that reads first."""

    def num_readers(self, want: Want, options: Mapping[Decision, int]) -> int:
        """Return how many regions want `want` under `options`."""
        return sum(use.count for use in self.uses if any(want in d.wants[options[d.decision]] for d in use.demands))


def find_tied(problem: Problem) -> list[Tied]:
    """Return the parameters that more than one region reads."""
    uses: dict[Source, list[Use]] = defaultdict(list)
    for use in problem.uses:
        if use.source.is_param and use.source.decision.count == 1:
            uses[use.source].append(use)
    return [_tied(source, found) for source, found in uses.items() if sum(use.count for use in found) > 1]


def _tied(source: Source, uses: list[Use]) -> Tied:
    num: dict[Want, int] = defaultdict(int)
    for use in uses:
        for want in {want for demand in use.demands for wants in demand.wants for want in wants}:
            num[want] += use.count
    readings = [
        ((use.region_class.members[member].index, demand.position), demand.decision)
        for use in uses
        for member in use.members
        for demand in use.demands
    ]
    first, reader = min(readings, key=lambda reading: reading[0])
    wants = tuple(sorted(want for want, count in num.items() if count > 1))
    return Tied(source, tuple(uses), wants, first, max(place for place, _ in readings), reader)


class SharedCopies:
    """The memory of copies for several readers, as columns in MiB, and the terms of the rows that count it."""

    def __init__(self, model: Model, problem: Problem, sharding: Sharding) -> None:
        self.model, self.problem = model, problem
        self.making: dict[Tied, int] = {}
        self.copy: dict[Tied, int] = {}
        self.gradient: dict[Tied, int] = {}
        self._back: dict[Decision, list[Terms]] = defaultdict(list)
        for tied in sharding.tied:
            found = {key[1:]: column for key, column in sharding.shared.items() if key[0] is tied.source}
            self._add(tied, found)

    def _add(self, tied: Tied, columns: Mapping[tuple[Layout, Want], int]) -> None:
        tensor, costs = tied.source.tensor, self.problem.costs
        making: Terms = []
        copy: Terms = []
        gradient: Terms = []
        back: Terms = []
        for (native, want), column in columns.items():
            if native != want[0]:
                making.append((column, costs.change_bytes(tensor, native, want[0]) / MIB))
                copy.append((column, costs.copy_bytes(tensor, native, want[0]) / MIB))
            if tensor.requires_grad:
                gradient.append((column, self._gradient_bytes(tied, native, want) / MIB))
                back.append((column, costs.change_bytes(tensor, want[1], gradient_layout(native)) / MIB))
        self.making[tied], self.copy[tied] = self._sum(making), self._sum(copy)
        self.gradient[tied] = self._sum(gradient)
        self._back[tied.reader].append(back)

    def _gradient_bytes(self, tied: Tied, native: Layout, want: Want) -> int:
        """Return the bytes of a gradient sum beyond those that the rows count already."""
        tensor, costs = tied.source.tensor, self.problem.costs
        if self.problem.program.num_runs == 1:
            return costs.block_bytes(tensor, want[1]) - costs.block_bytes(tensor, native)
        return costs.block_bytes(tensor, want[1]) if native != want[0] else 0

    def _sum(self, terms: Terms) -> int:
        column = self.model.column(lower=-float("inf"))
        self.model.row(SHARED, [*terms, (column, -1.0)], 0.0, 0.0)
        return column

    def forward(self, region_class: RegionClass, position: int) -> Terms:
        """Return what is there while a group runs forward in the instance, of those within reach, that holds most."""
        terms: Terms = []
        for tied in self.copy:
            places = [(member.index, position) for member in region_class.members]
            if tied.first in places:
                terms.append((self.making[tied], 1.0))
            elif any(tied.first < place <= tied.last for place in places):
                terms.append((self.copy[tied], 1.0))
        return terms

    def backward(self, region: int, position: float) -> Terms:
        """Return what is there while a group of a region runs backward."""
        place = (region, position)
        return [(column, 1.0) for tied, column in self.gradient.items() if tied.first <= place < tied.last]

    def back(self, decision: Decision) -> list[Terms]:
        """Return what bringing back the gradients of copies that `decision` reads first holds, each by itself."""
        return self._back[decision]
