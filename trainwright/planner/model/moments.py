"""What the backward of a group holds for a moment, op by op.

An op has up to three moments, and the group's row (`memory`) counts the largest of all of them:

    running     Σ x · (the gradients that are there, and the op's scratch memory), and the padding of gradients that were gathered,
                until the op has read what was saved
    ending      the same afterwards: operands of a linear that were made again are gone before its bias's gradient is summed
    changing    Σ x · gradients, and the most that is held while one of those that the op completed changes its layout

All also count what gradients that earlier ops brought back hold more, or less, than as those ops made them; and, from the op
on that makes the region's first gradient of a parameter, the buffer that it goes into. None counts saved tensors that earlier
ops were the last to need, nor the last one those of the op itself: they are released.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ...program.blocks import RegionClass
from ...program.program import Op, Tensor
from ...program.transition import gradient_layout
from ..problem.problem import Decision, OpBackward
from .forward_memory import Changes
from .milp import Model, Terms
from .sharding import Sharding
from .waiting_gradients import WaitingGradients
from .working_set import Item

MOMENTARY = "what a group's backward holds for a moment"
READ = "what is gone once it is read"


class Moments:
    """The terms of the moments of groups' backwards."""

    def __init__(
        self,
        model: Model,
        sharding: Sharding,
        changes: Changes,
        waiting: WaitingGradients,
        items: Mapping[RegionClass, list[Item]],
    ) -> None:
        self.model, self.sharding, self.changes, self.waiting, self.items = model, sharding, changes, waiting, items
        self.owner = {op: decision for decision in waiting.problem.groups for op in _ops(decision)}

    def group(self, decision: Decision) -> list[Terms]:
        """Return what a group's backward holds: while each op's kernels run, and while gradients change their layout.

        In buckets the gradients of parameters go into a buffer, which is there from the op on that makes the first of them.
        """
        assert decision.group is not None
        return self._of(decision, [op for op in decision.backwards if op.moment == decision.group.index])

    def late(self, decision: Decision) -> Iterator[tuple[float, Op, list[Terms]]]:
        """Yield the moments at which ops of a group run whose backward comes before that of groups behind, with the same.

        What a projection's heads are cut into stands with it, and may run behind other projections. Beside each stands the last
        of its ops.
        """
        assert decision.group is not None
        for moment in sorted({op.moment for op in decision.backwards} - {decision.group.index}):
            late = [op for op in decision.backwards if op.moment == moment]
            yield moment, decision.group.ops[late[-1].place], self._of(decision, late)

    def _of(self, decision: Decision, backwards: Sequence[OpBackward]) -> list[Terms]:
        assert decision.region_class is not None
        assert decision.group is not None
        opened = self.changes.buckets.opened(decision.region_class, decision.group.index)
        opens_at = max(
            (place for place, op in enumerate(decision.group.ops) if any(map(_is_trained, op.inputs))), default=-1
        )
        given = self.waiting.of_outputs(decision)
        moments = []
        for op in backwards:
            brought = [*self.changes.brought(decision, op.place), *self._beside(op)]
            buffer = opened if op.place < opens_at else []
            given_too = self.waiting.given_too(decision, op.place)
            there = [*given, *brought, *buffer, *given_too, *self._released(decision, op.place + 1)]
            moments.append([*self.sharding.chosen_mib(decision, op.running_bytes), *there])
            moments.append(
                [*self.sharding.chosen_mib(decision, op.ending_bytes), *there, *self._made_again(decision, op)]
            )
            changing = self.changes.backward(decision, op.place)
            buffer = opened if op.place <= opens_at else []
            if changing or buffer:
                made = [*self.sharding.chosen_mib(decision, op.made_bytes), *brought, *changing]
                moments.append([*made, *buffer, *self._released(decision, op.place)])
        return self._without_smaller(decision, moments)

    def _beside(self, op: OpBackward) -> Terms:
        """Return the terms of gradients of groups behind that wait until the op has run."""
        terms: Terms = []
        costs = self.waiting.problem.costs
        for tensor in op.beside:
            producer = tensor.producer
            assert producer is not None
            decision, place = self.owner[producer], producer.outputs.index(tensor)
            assert decision.group is not None
            layouts = [decision.group.output_layout(producer, place, split) for split in decision.options]
            sizes = [costs.block_bytes(tensor, gradient_layout(layout)) for layout in layouts]
            terms += [*self.sharding.chosen_mib(decision, sizes), *self.waiting.of_outputs(decision)]
        return terms

    def _released(self, decision: Decision, place: int) -> Terms:
        """Return the (negative) terms of what a group saved and has released once its ops from `place` on have run backward."""
        terms = [(item.present, -1.0) for item, at in self._read_last(decision) if at >= place]
        freed = [sizes for at, sizes in decision.inner_freed.items() if at >= place]
        inner = self.sharding.chosen_mib(decision, [sum(sizes) for sizes in zip(*freed)])
        return [*terms, *((column, -size) for column, size in inner)]

    def _made_again(self, decision: Decision, op: OpBackward) -> Terms:
        """Return the (negative) terms of what was made again, or came back, and an op is the last to need: it goes once it is read.

        What stayed goes when the backward of the op is over. Of a class of several instances the row stands for those whose
        stayed too, and nothing goes before.
        """
        assert decision.region_class is not None
        is_higher = any(ending > running for ending, running in zip(op.ending_bytes, op.running_bytes))
        if not is_higher or decision.region_class.multiplicity > 1:
            return []
        items = [item for item, at in self._read_last(decision) if at == op.place]
        return [(self._of_rerun(item), -1.0) for item in items]

    def _of_rerun(self, item: Item) -> int:
        """Return the column of what a single instance needs and did not keep on the device, in MiB.

        At least 0: so it keeps no copy that reruns alone need.
        """
        column = self.model.column()
        self.model.row(READ, [(column, 1.0), (item.present, -1.0)], upper=0.0)
        instance = [(choice, -size) for choice, size in item.instance]
        self.model.row(READ, [(column, 1.0), (item.kept, 1.0), *instance], upper=0.0)
        return column

    def _read_last(self, decision: Decision) -> Iterator[tuple[Item, int]]:
        """Yield what the group's backward is the last to read in all its regions, with the place of the op that does."""
        assert decision.region_class is not None
        ends = {0, decision.region_class.multiplicity - 1}
        for item in self.items[decision.region_class]:
            if item.freed_by is not None and item.freed_by[0] is decision and ends <= item.members:
                yield item, item.freed_by[1]

    def _without_smaller(self, decision: Decision, moments: list[Terms]) -> list[Terms]:
        """Return moments of a group without those that hold no more than another one whatever is chosen.

        Moments that differ in the sizes of the group's options alone are one, with the largest of each.
        """
        choice = self.sharding.choice[decision]
        merged: dict[tuple[tuple[int, float], ...], dict[int, float]] = {}
        for terms in moments:
            sums: dict[int, float] = defaultdict(float)
            for column, size in terms:
                sums[column] += size
            others = tuple(sorted((column, size) for column, size in sums.items() if column not in choice))
            found = merged.setdefault(others, dict.fromkeys(choice, -math.inf))
            found.update({column: max(found[column], sums.get(column, 0.0)) for column in choice})
        distinct = [dict(others) | own for others, own in merged.items()]
        kept = [
            terms
            for at, terms in enumerate(distinct)
            if not any(_holds_less(terms, other, tie=at > k) for k, other in enumerate(distinct) if k != at)
        ]
        return [[(column, size) for column, size in terms.items() if size] for terms in kept]


def _ops(decision: Decision) -> list[Op]:
    assert decision.group is not None
    return decision.group.ops


def _is_trained(tensor: Tensor) -> bool:
    return tensor.role == "param" and tensor.requires_grad


def _holds_less(terms: Mapping[int, float], other: Mapping[int, float], *, tie: bool) -> bool:
    """Tell whether no column, all of which are at least 0, makes `terms` more than `other`; tie: if they are the same too."""
    more = [terms.get(column, 0.0) - other.get(column, 0.0) for column in {**terms, **other}]
    return max(more, default=0.0) <= 0 and (tie or min(more, default=0.0) < 0)
