"""Sums over ranks of what the batch alone says, begun before the step's own work: how many labels a mean is over.

Else all ranks would meet where the loss is computed, and wait there for the slowest, to exchange one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ops.local import WithSum
from .instructions import Compute, Instruction, Ref, Reshard
from .local import LocalProgram
from .program import Op, Tensor
from .randomness import needs_state
from .run_state import RunState

MAX_GROWTH = 4
"""Values that are made so early, in bytes of the batch entries that they are made from: they live until the loss."""


@dataclass(frozen=True)
class EarlySum:
    """The sum that one instruction waits for."""

    instruction: Compute
    first: tuple[int, ...]
    """The instructions that make what is summed of, in order."""

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
            first = _makers(local, instruction, producers)
            if first is not None:
                found.append(EarlySum(instruction, tuple(sorted(first))))
    return found


def said_by_the_batch(tensors: Sequence[Tensor]) -> bool:
    """Tell whether what is summed of these can be begun before anything else, where no rank has to be asked for them."""
    queue = list(tensors)
    makers: set[Op] = set()
    given = made = 0
    while queue:
        tensor = queue.pop()
        if tensor.producer is None:
            if tensor.role not in ("input", "const"):
                return False
            given += tensor.num_bytes
        elif (op := tensor.producer) not in makers:
            if op.requires_grad or op.kind == "heavy" or needs_state(op):
                return False
            makers.add(op)
            made += tensor.num_bytes
            queue += op.inputs
    return made <= MAX_GROWTH * given


def _makers(local: LocalProgram, instruction: Compute, producers: dict[int, Instruction]) -> set[int] | None:
    """The instructions behind what is summed of; None unless they need the batch and constants alone, and make little."""
    summed = [instruction.args[place] for place in instruction.function.places]  # type: ignore[attr-defined]
    queue = [arg.value for arg in summed if isinstance(arg, Ref)]
    makers: set[int] = set()
    given = made = 0
    while queue:
        value = queue.pop()
        tensor, producer = local.values[value].tensor, producers.get(value)
        if producer is None:
            if tensor.role not in ("input", "const"):
                return None
            given += tensor.num_bytes
        elif producer.index not in makers:
            if not _is_plain(producer, local):
                return None
            makers.add(producer.index)
            made += tensor.num_bytes
            queue += producer.inputs
    return makers if made <= MAX_GROWTH * given else None


def _is_plain(instruction: Instruction, local: LocalProgram) -> bool:
    """Whether an instruction may be carried out early: it sends nothing, draws nothing, and no gradient goes through it."""
    if any(local.values[value].tensor.requires_grad for value in instruction.outputs):
        return False
    match instruction:
        case Reshard(there=there):
            return not there.moves
        case Compute(op=op, function=function):
            known = function is op.node.target or op.kind != "heavy"
            return known and not needs_state(op) and not op.runs_once
        case _:
            return False


def with_sum(instruction: Compute) -> Callable[..., Any] | None:
    """Return the instruction's function with the run's state in front, where it takes a sum that may have been begun."""
    function, index = instruction.function, instruction.index
    if not isinstance(function, WithSum):
        return None

    def call(state: RunState, *args: Any) -> Any:
        pending = state.sums.get(index)
        return function(*args) if pending is None else function.function(pending.wait(), *args)

    return call
