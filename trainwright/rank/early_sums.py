"""Begins, before the step's own work, the sums over ranks that read the batch alone, as the number of labels of a mean.

Without this, all ranks would meet at the loss and wait there for the slowest, to exchange one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ops import find
from ..ops.local import WithSum
from ..program.drawing import needs_state
from ..program.program import Op, Tensor
from .instructions import Compute, Instruction, Ref, Reshard
from .local import LocalProgram
from .run_state import RunState

MAX_GROWTH = 4
"""The bytes of values that may be made early, over those of the batch entries that they are made from.

Such values live until the loss, so they must not be large."""


@dataclass(frozen=True)
class EarlySum:
    """The sum that one instruction waits for."""

    instruction: Compute
    first: tuple[int, ...]
    """The instructions that make the sum's operands, in order."""

    def begin(self, env: dict[int, Any]) -> Any:
        """Begin the sum, once `first` have been carried out."""
        function, args = self.instruction.function, self.instruction.args
        assert isinstance(function, WithSum)
        return function.begin([env.get(arg.value) if isinstance(arg, Ref) else arg for arg in args])


def early_sums(local: LocalProgram) -> list[EarlySum]:
    """Return the sums that can be begun before anything else, in the order of the instructions that take them."""
    producers = {value: i for i in local.instructions for value in i.outputs}
    found = []
    for instruction in local.instructions:
        if isinstance(instruction, Compute) and isinstance(instruction.function, WithSum):
            summed = [instruction.args[place] for place in instruction.function.places]
            made = _Made(
                producer=producers.get, tensor=lambda value: local.values[value].tensor, may_be_early=_may_be_early
            )
            first = made.first_of([arg.value for arg in summed if isinstance(arg, Ref)])
            if first is not None:
                found.append(EarlySum(instruction, tuple(sorted(maker.index for maker in first))))
    return found


def said_by_the_batch(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a sum of these tensors can begin before anything else, if no reshard of them communicates.

    Where one does, the program begins no such sum, and its price charges the sum (`planner.costs.price`).
    """
    made = _Made(producer=lambda tensor: tensor.producer, tensor=lambda tensor: tensor, may_be_early=_is_early_op)
    return made.first_of(tensors) is not None


@dataclass(frozen=True)
class _Made:
    """A view of a program's producers: ops that make tensors, or instructions that make local values."""

    producer: Callable[[Any], Any]
    """Returns the producer of a value; None for a source."""
    tensor: Callable[[Any], Tensor]
    may_be_early: Callable[[Any], bool]

    def first_of(self, values: Iterable[Any]) -> list[Any] | None:
        """Return the producers of `values`; None unless they read the batch and constants alone, and make little."""
        queue = list(values)
        makers: list[Any] = []
        given_bytes = made_bytes = 0
        while queue:
            value = queue.pop()
            tensor, producer = self.tensor(value), self.producer(value)
            if producer is None:
                if tensor.role not in ("input", "const"):
                    return None
                given_bytes += tensor.num_bytes
            elif producer not in makers:
                if not self.may_be_early(producer):
                    return None
                makers.append(producer)
                made_bytes += tensor.num_bytes
                queue += producer.inputs
        return makers if made_bytes <= MAX_GROWTH * given_bytes else None


def _may_be_early(instruction: Instruction) -> bool:
    """Tell whether an instruction may be carried out early: it sends nothing, and no gradient goes through it."""
    match instruction:
        case Reshard(there=there, differentiable=differentiable):
            return not there.moves and not differentiable
        case Compute(op=op):
            return _is_early_op(op)
        case _:
            return False


def _is_early_op(op: Op) -> bool:
    """Tell whether an op has no gradient, draws nothing, writes nothing, and is the same on every rank."""
    is_plain = op.kind != "heavy" or find(op.name).localize is None
    return is_plain and not op.requires_grad and not needs_state(op) and not op.runs_once


def with_sum(instruction: Compute) -> Callable[..., Any] | None:
    """Return the instruction's function with the run's state in front, where it takes a sum that may have been begun."""
    function, index = instruction.function, instruction.index
    if not isinstance(function, WithSum):
        return None

    def call(state: RunState, *args: Any) -> Any:
        pending = state.sums.get(index)
        return function(*args) if pending is None else function.function(pending.wait(), *args)

    return call
