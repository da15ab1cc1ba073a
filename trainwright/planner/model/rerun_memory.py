"""What reruns hold for a moment, where a region's backward begins.

Reruns follow one another as the forward did: that of group i is moment i, what is converted for it comes at i − ½.

    running       Σ r / M · (scratch, and what the group makes), and what one collective gathered again and waits to be copied out
    converting    Σ C / M · (the most that the change of layout holds, its result included), and what one collective gathered again
    beside        what was made again and is still to be read or saved, and nothing that is made later (`Item.beside`): the row
                  of the last group counts all that its backward begins with

Each stands beside the gradients at which the backward of the region's last group begins. Of several instances that holds for the
last one, which is rerun where r = M. Of the first, which is where r ≥ 1, r / M counts too little; so nothing is taken off, and what
a group reads, makes or converts counts only if no backward needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...program.blocks import RegionClass
from ..problem.problem import Decision, Problem, Use
from .bucket_memory import BucketMemory
from .milp import MIB, Terms
from .recompute import Recompute
from .sharding import Sharding
from .working_set import Item, copies_made_again, when_converted


@dataclass(eq=False)
class _Converting:
    """The MiB that reruns hold while they convert a tensor for a use, and its operand where nothing keeps that."""

    changes: Terms = field(default_factory=list)
    operand: Terms = field(default_factory=list)


class RerunMemory:
    """The terms of a region's reruns in the memory rows."""

    def __init__(self, problem: Problem, sharding: Sharding, recompute: Recompute, buckets: BucketMemory) -> None:
        self.problem, self.sharding, self.recompute, self.buckets = problem, sharding, recompute, buckets
        self._copies = copies_made_again(problem, recompute)
        self._converting: dict[RegionClass, dict[Use, _Converting]] = defaultdict(lambda: defaultdict(_Converting))
        for (use, native, want), column in recompute.convert.items():
            if not use.source.is_param:
                tensor, stored = use.source.tensor, problem.stored_of[use]
                found, num = self._converting[use.region_class][use], use.count * MIB
                found.changes.append((column, problem.costs.change_bytes(tensor, native, want[0]) / num))
                if use.inside and not (stored.own_saved or stored.boundary or stored.held):
                    found.operand.append((column, problem.costs.block_bytes(tensor, native) / num))

    def of_first(self, decisions: Sequence[Decision]) -> list[Terms]:
        """Return what each rerun of the first of several instances holds; `decisions` are the region's groups in order."""
        region_class = _class_of(decisions)
        moments = [
            [*self._by_share(decision, decision.rerun_bytes), *self._gathered(region_class, _position(decision))]
            for decision in decisions
        ]
        for use, found in self._converting[region_class].items():
            moments.append([*found.changes, *found.operand, *self._gathered(region_class, _first_reader(use))])
        return [[*self._given(decisions), *terms] for terms in moments if terms]

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

        def beside(moment: float, result: Use | None = None) -> Iterator[tuple[int, float]]:
            for item in items:
                yield from item.beside(moment, last, item.owner is result)
            for use, terms in passing:
                made_at, read_until = when_converted(use, self.sharding)
                if made_at < moment <= read_until and use is not result:
                    yield from terms

        moments = []
        for decision in decisions:
            at = _position(decision)
            running = [*self._by_share(decision, decision.remade_bytes), *self._gathered(region_class, at)]
            moments.append((running, beside(at)))
        for use, found in self._converting[region_class].items():
            at = _first_reader(use)
            moments.append(([*found.changes, *self._gathered(region_class, at)], beside(at - 0.5, use)))
        return [[*self._given(decisions), *terms, *others] for terms, others in moments if terms]

    def _given(self, decisions: Sequence[Decision]) -> Terms:
        return self.sharding.chosen_mib(decisions[-1], decisions[-1].given_bytes)

    def _gathered(self, region_class: RegionClass, position: int) -> Terms:
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


def _first_reader(use: Use) -> int:
    return min(demand.position for demand in use.demands)
