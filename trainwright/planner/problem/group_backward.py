"""What the backward of a group holds, op by op: its ops run in reverse, and hand gradients on to one another.

    running   gradients that are there, and what the op's backward takes beside those that it is given, until it has read what
              was saved
    ending    the same afterwards
    made      gradients that are there when it is done, those that it was given gone

There are at first the gradients of the tensors that other groups read. A gradient stays until the op that made its tensor has
run, and that of an operand of the group to the end. Some ops hand on the very memory that they were given: a sum to its terms,
a view to what it views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...program.groups import Group, Split
from ...program.program import Op, Tensor
from ..costs.costs import CostModel
from .problem import OpBackward


def backward_of(group: Group, options: Sequence[Split], costs: CostModel) -> list[OpBackward]:
    """Return the backward of each op that has one, in the order in which they run."""
    each = [list(_Backward(group, split, costs).ops()) for split in options]
    return [_placed(group, _of_all(found)) for found in zip(*each)]


def _of_all(found: Sequence[OpBackward]) -> OpBackward:
    """Return one op's backward under all options from those under each."""
    running = tuple(size for own in found for size in own.running_bytes)
    ending = tuple(size for own in found for size in own.ending_bytes)
    made = tuple(size for own in found for size in own.made_bytes)
    return replace(found[0], running_bytes=running, ending_bytes=ending, made_bytes=made)


class _Backward:
    """The gradients that are there while the ops of a group run backward under one option."""

    def __init__(self, group: Group, split: Split, costs: CostModel) -> None:
        self.group, self.split, self.costs = group, split, costs
        self.memory: dict[Tensor, int] = {}
        """The number of the memory in which each gradient lies."""
        self.sizes: dict[int, int] = {}
        self.given: set[int] = set()
        """The numbers of those that readers outside the group made."""
        self.inside = set(group.ops)

    def ops(self) -> Iterator[OpBackward]:
        """Yield the backward of each op with the bytes of this option."""
        for place in reversed(range(len(self.group.ops))):
            op = self.group.ops[place]
            self._receive(op)
            if op.requires_grad:
                yield self._run(op, place)

    def _receive(self, here: Op) -> None:
        """Add the gradients that readers outside have given before `here` runs backward.

        A reader that stands between the ops of the group, as cos · q before the halves of q that are rotated, gives its gradient
        when some of them have run.
        """
        for op in self.group.ops:
            for place, tensor in enumerate(op.outputs if op.position <= here.position else ()):
                readers = [reader for reader in tensor.consumers if reader not in self.inside]
                is_given = tensor.requires_grad and any(runs_before(reader, here) for reader in readers)
                if is_given and tensor not in self.memory:
                    self.given.add(self._add(tensor, self._given_bytes(op, place)))

    def _run(self, op: Op, place: int) -> OpBackward:
        outputs = [tensor for tensor in op.outputs if tensor.requires_grad]
        for tensor in outputs:
            if tensor not in self.memory:  # nobody reads it
                self._add(tensor, self._given_bytes(op, op.outputs.index(tensor)))
        before = self._live_bytes()
        running, ending = (before + size for size in self.costs.backward_bytes(self.group, op, self.split))
        given = self.memory[outputs[0]]
        makes = {tensor: at for at, tensor in enumerate(op.inputs) if tensor.requires_grad}
        handed = _handed_on(op, makes, self.costs)
        for tensor, at in makes.items():
            if tensor in handed and tensor not in self.memory:
                self.memory[tensor] = given
            else:
                self._add(tensor, self.costs.gradient_bytes(self.group, op, at, self.split))
        for tensor in outputs:
            del self.memory[tensor]
        made = self._live_bytes()
        owners = list(self.memory.values())
        shares = frozenset(tensor for tensor in makes if owners.count(self.memory[tensor]) > 1)
        passes_on = frozenset(tensor for tensor in makes if self.memory[tensor] in self.given)
        made = min(made, max(running, ending))
        return OpBackward(place, self.group.index, (running,), (ending,), (made,), shares, passes_on)

    def _add(self, tensor: Tensor, num_bytes: int) -> int:
        """Give a gradient memory of its own; return its number."""
        self.memory[tensor] = number = len(self.sizes)
        self.sizes[number] = num_bytes
        return number

    def _live_bytes(self) -> int:
        return sum(self.sizes[number] for number in set(self.memory.values()))

    def _given_bytes(self, op: Op, place: int) -> int:
        return self.costs.block_bytes(op.outputs[place], self.group.output_layout(op, place, self.split))


def runs_before(op: Op, here: Op) -> bool:
    """Tell whether the backward of `op`, which reads what a region made, comes before that of `here` in it."""
    return op.region is not here.region or op.position > here.position


def _placed(group: Group, backward: OpBackward) -> OpBackward:
    """Return the backward of an op with when it runs, and what waits then."""
    here = group.ops[backward.place]
    assert here.region is not None
    region_class = here.region.region_class
    moment = group.late_moment(here, region_class.groups)
    beside = tuple(
        tensor
        for op in region_class.representative.ops[: here.position]
        if moment > group.index and region_class.group_at[op.position].index > moment
        for tensor in op.outputs
        if tensor.requires_grad and any(runs_before(reader, here) for reader in tensor.consumers)
    )
    return replace(backward, moment=moment, beside=beside)


def _handed_on(op: Op, makes: dict[Tensor, int], costs: CostModel) -> set[Tensor]:
    """Return the operands whose gradients lie in the memory of the one that the op is given: it makes less than all of them."""
    rest = sum(tensor.num_bytes for tensor in makes) - max(costs.records[op].backward_bytes)
    handed = set()
    for tensor in makes:
        if tensor.num_bytes <= rest:
            handed.add(tensor)
            rest -= tensor.num_bytes
    return handed
