"""What reruns hold for a moment, before a region's backward begins.

A region reruns its groups in the order of the forward: group i at moment i, and what is converted for it shortly before
(`working_set.before`). A group's ops may be apart; those that run before groups ahead of their own have a moment between these
(`Group.moment`). Each rerun and each conversion is a moment of the row of the region's last group, whose backward follows,
beside the gradients that this backward begins with. The last of M instances reruns a group where all of them do:

    running       Σ r / M · (the scratch memory of the group, and what it makes)
    converting    Σ C / M · (the most that the change of layout holds, its result included). In buckets parameters are gathered
                  before the first rerun; of a gather in several steps, the first is issued early, and what it leaves counts too
    gathered      what one collective gathered again and the reruns still have to copy out (`bucket_memory`)
    beside        what was made again before, and is still to be read or saved. What is made later is not there yet, and is taken
                  off: the row counts it with all else that the region's backward begins with (`Item.beside`)

The first instance reruns a group where any does:

    none          N ∈ {0, 1},  1 − N ≤ Σ r ≤ M · (1 − N); of a conversion with C in place of r
    running       Σ x · (scratch memory, what the group makes, and what it reads that no backward needs) − most · N
    converting    Σ f · (the most that the change of layout holds, and its operand where no backward needs that) − most · N
    beside        − A for each tensor that is made at that moment or later,  A ≤ P and A ≤ most · (1 − N)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...program.blocks import RegionClass
from ...program.layout import Layout
from ..problem.problem import Decision, Problem, Use, Want
from .bucket_memory import BucketMemory
from .joined import travel_of
from .milp import MIB, Model, Terms
from .recompute import Recompute
from .sharding import Sharding, has_one_want, ones, wants_of
from .waiting_gradients import WaitingGradients
from .working_set import Item, converting_moment, copies_made_again, gathered_first, when_converted

PADDED = "what a gather leaves beside a copy that is made again"
FIRST = "what the first of several instances reruns"


@dataclass(eq=False)
class _Converting:
    """The MiB that reruns hold while they convert a tensor for a use, and its operand where nothing keeps that."""

    changes: Terms = field(default_factory=list)
    operand: Terms = field(default_factory=list)
    chosen: Terms = field(default_factory=list)
    """Both, of one instance, by what is converted in the forward."""


class RerunMemory:
    """The terms of a region's reruns in the memory rows."""

    def __init__(
        self,
        model: Model,
        problem: Problem,
        sharding: Sharding,
        recompute: Recompute,
        buckets: BucketMemory,
        waiting: WaitingGradients,
    ) -> None:
        self.model, self.problem, self.sharding, self.recompute = model, problem, sharding, recompute
        self.buckets, self.waiting = buckets, waiting
        self._nones: dict[Decision | Use, int | None] = {}
        self._remade_of: dict[Item, int | None] = {}
        self._copies = copies_made_again(problem, recompute)
        self._padding: dict[Use, Terms] = defaultdict(list)
        """What gathers of the copies that are made again leave beside them."""
        for (use, native, want), column in recompute.convert.items():
            tensor = use.source.tensor
            more = problem.costs.copy_bytes(tensor, native, want[0]) - problem.costs.block_bytes(tensor, want[0])
            if more > 0 and not use.source.is_param:
                self._padding[use].append((column, more / use.count / MIB))
        self._converting: dict[RegionClass, dict[Use, _Converting]] = defaultdict(lambda: defaultdict(_Converting))
        for (use, native, want), column in recompute.convert.items():
            if not self._joins_others(use, native, want):
                tensor, stored = use.source.tensor, problem.stored_of.get(use)
                found, num = self._converting[use.region_class][use], use.count * MIB
                change, operand = problem.costs.change_bytes(tensor, native, want[0]), 0
                change += self._issued_bytes(use, native, want)
                found.changes.append((column, change / num))
                if use.inside and stored is not None and not (stored.own_saved or stored.boundary or stored.held):
                    operand = problem.costs.block_bytes(tensor, native)
                    found.operand.append((column, operand / num))
                found.chosen.append((sharding.flow[use, native, want], (change + operand) / MIB))

    def _joins_others(self, use: Use, native: Layout, want: Want) -> bool:
        """Tell whether one collective gathers it with others, and no other step follows (`_gathered`)."""
        if not gathered_first(use, self.sharding):
            return False
        travel = travel_of(self.problem, use, native, want)
        return travel.gather_key is not None and len(travel.there) == 1

    def _issued_bytes(self, use: Use, native: Layout, want: Want) -> int:
        """Return the bytes of the first of several steps of a gather that is issued early: it stays until the last one is done."""
        if not gathered_first(use, self.sharding):
            return 0
        steps = travel_of(self.problem, use, native, want).there
        return self.problem.costs.copy_bytes(use.source.tensor, native, steps[0].after) if len(steps) > 1 else 0

    def of_first(self, decisions: Sequence[Decision], items: Sequence[Item]) -> list[Terms]:
        """Return what each rerun of the first of several instances holds, beyond what is there once all were run again.

        decisions: the region's groups in order. items: what the region may keep or rederive.
        """
        region_class, last = _class_of(decisions), _position(decisions[-1])
        own = [item for item in items if 0 in item.members and item.position <= last]

        def later(moment: float, result: Use | None = None) -> Terms:
            """Return the (negative) terms of what is made again at that moment or later."""
            behind = [item for item in own if moment <= item.made_at or item.owner is result]
            return [(column, -1.0) for item in behind if (column := self._remade(item, last)) is not None]

        moments = []
        for decision in decisions:
            if (none := self._none(decision)) is not None:
                at, chosen = _position(decision), self.sharding.chosen_mib(decision, decision.rerun_bytes)
                moments.append([*_unless(none, chosen), *self._gathered(region_class, at), *later(at)])
        for use, found in self._converting[region_class].items():
            if 0 in use.members:
                moment, none = converting_moment(use, self.sharding), self._none(use)
                held = [*found.changes, *found.operand]
                if none is not None and has_one_want(use):
                    held = [*_unless(none, found.chosen), *later(moment, use)]
                moments.append([*held, *self._gathered(region_class, moment)])
        return [[*self._given(decisions), *terms] for terms in moments if terms]

    def _none(self, owner: Decision | Use) -> int | None:
        """Return the column that is 1 if no instance reruns a group, or converts for a use again; None if none can."""
        if owner not in self._nones:
            table = self.recompute.rerun if isinstance(owner, Decision) else self.recompute.convert
            again = [column for key, column in table.items() if key[0] is owner]
            most = float(owner.count if isinstance(owner, Decision) else owner.count * len(wants_of(owner)))
            none = self.model.column(1.0, integer=True) if again else None
            if none is not None:
                self.model.row(FIRST, [*ones(again), (none, most)], upper=most)
                self.model.row(FIRST, [*ones(again), (none, 1.0)], lower=1.0)
            self._nones[owner] = none
        return self._nones[owner]

    def _remade(self, item: Item, last: int) -> int | None:
        """Return the column of what the first instance makes again of an item, as the row of its `last` group counts that.

        None if it makes nothing again.
        """
        if item not in self._remade_of:
            none, column = self._none(item.owner), None
            if none is not None:
                column = self.model.column()
                counted = item.waiting if item.first < last else item.present
                self.model.row(FIRST, [(column, 1.0), (counted, -1.0)], upper=0.0)
                self.model.row(FIRST, [(column, 1.0), (none, item.most_mib)], upper=item.most_mib)
            self._remade_of[item] = column
        return self._remade_of[item]

    def of_last(self, decisions: Sequence[Decision], items: Sequence[Item]) -> list[Terms]:
        """Return what each rerun of the last instance holds, beyond what is there once all were run again.

        items: what the region may keep or rederive.
        """
        region_class, last = _class_of(decisions), _position(decisions[-1])
        owners = {item.owner for item in items}
        # copies that no backward needs are no items
        passing = [
            (use, terms)
            for use, terms in self._copies.items()
            if use.region_class is region_class and use not in owners
        ]

        saved = {item.owner: item.present for item in items}
        padding = [
            (use, self._unless_saved(use, saved.get(use)))
            for use in self._padding
            if use.region_class is region_class and region_class.multiplicity - 1 in use.members
        ]

        def beside(moment: float, result: Use | None = None) -> Iterator[tuple[int, float]]:
            for item in items:
                yield from item.beside(moment, last, item.owner is result)
            for use, terms in passing:
                made_at, read_until = when_converted(use, self.sharding)
                if made_at < moment <= read_until and use is not result:
                    yield from terms
            for use, terms in padding:
                if 0 < moment - when_converted(use, self.sharding)[1] <= 0.5:  # its last reader counts it without
                    yield from terms

        moments = []
        for decision in decisions:
            at = _position(decision)
            running = [*self._by_share(decision, decision.remade_bytes), *self._gathered(region_class, at)]
            moments.append((running, beside(at)))
        for use, found in self._converting[region_class].items():
            moment = converting_moment(use, self.sharding)
            moments.append(([*found.changes, *self._gathered(region_class, moment)], beside(moment, use)))
        return [[*self._given(decisions), *terms, *others] for terms, others in moments if terms]

    def _unless_saved(self, use: Use, saved: int | None) -> Terms:
        """Return the terms of the padding of copies that are made again, but of those that a backward needs and its item counts."""
        if saved is None:
            return self._padding[use]
        column = self.model.column()
        self.model.row(PADDED, [*self._padding[use], (saved, -1.0), (column, -1.0)], upper=0.0)
        return [(column, 1.0)]

    def _given(self, decisions: Sequence[Decision]) -> Terms:
        chosen = self.sharding.chosen_mib(decisions[-1], decisions[-1].given_bytes)
        return [*chosen, *self.waiting.of_outputs(decisions[-1])]

    def _gathered(self, region_class: RegionClass, position: float) -> Terms:
        return self.buckets.rerun(region_class, position)

    def _by_share(self, decision: Decision, sizes: Sequence[int]) -> Iterator[tuple[int, float]]:
        for option, size in enumerate(sizes):
            if size and (decision, option) in self.recompute.rerun:
                yield self.recompute.rerun[decision, option], size / decision.count / MIB


def _class_of(decisions: Sequence[Decision]) -> RegionClass:
    region_class = decisions[-1].region_class
    assert region_class is not None
    return region_class


def _position(decision: Decision) -> int:
    assert decision.group is not None
    return decision.group.index


def _unless(none: int, chosen: Terms) -> Terms:
    """Return the terms of `chosen`, at most 0 where the column `none` is 1."""
    return [*chosen, (none, -max((size for _, size in chosen), default=0.0))]
