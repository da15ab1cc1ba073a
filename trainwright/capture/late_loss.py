"""The loss's own sum over the ranks, waited for at the end of the step where its value is not read before.

Else all ranks meet where the forward ends, the faster waiting for the slower, for one number that the backward does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .buckets import only_sums
from .local import LocalProgram, Ref
from .program import Program
from .reshard import Route, reshard
from .transition import Step

if TYPE_CHECKING:
    from .execute import Call

Finish = Callable[[], object]
"""Waits for a loss's value, and puts it where the loss is."""


def summing_the_loss(local: LocalProgram) -> int | None:
    """Return which instruction sums the loss over ranks; None where none does, or where something goes on from the sum."""
    loss = local.outputs[local.program.captured.loss_index]
    if not isinstance(loss, Ref) or any(loss.value in instruction.inputs for instruction in local.instructions):
        return None
    makers = [instruction for instruction in local.instructions if loss.value in instruction.outputs]
    if len(makers) != 1 or makers[0].function is not reshard:
        return None
    return makers[0].index if only_sums(makers[0].args[1].steps) else None


def comes_late(program: Program, steps: Sequence[Step]) -> bool:
    """Tell whether nothing in a step waits for the loss, which `steps` bring to all ranks: a sum of which no op goes on."""
    return program.num_runs == 1 and only_sums(steps) and not program.loss.consumers


def late(compute: Call, local: LocalProgram, index: int) -> Call:
    """Return the call of instruction `index`, which sums the loss: `compute`, unless the run takes the value late."""
    instruction = local.instructions[index]
    given, there, back = instruction.args
    (output,) = instruction.outputs

    def call(env: dict[int, Any], state: Any) -> None:
        if state.late is None:
            compute(env, state)
        else:
            env[output] = _LateSum.apply(env[given.value], there, back, state.late)

    return call


class _LateSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, there: Route, back: Route, late: list[Finish]) -> Tensor:
        ctx.route = back
        pending, value = there.start(part), part.clone()
        # by `data`: a multiple of the loss may have saved it, and its backward does not read it
        late.append(lambda: value.data.copy_(pending.wait()))
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.route.run(grads[0]), None, None, None
