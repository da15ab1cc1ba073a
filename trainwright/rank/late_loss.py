"""Waits for the loss's sum over the ranks at the end of the step, where nothing reads the value before.

Without this, all ranks would meet where the forward ends, for one number that the backward does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.program import Program
from ..program.transition import ReshardStep
from .instructions import Ref, Reshard
from .local import LocalProgram
from .reshard import Route
from .run_state import BoundCall, Finish, RunState
from .travel import only_sums


def summing_the_loss(local: LocalProgram) -> Reshard | None:
    """Return the instruction that sums the loss over ranks; None where none does, or where an instruction reads the sum."""
    loss = local.outputs[local.program.captured.loss_index]
    if not isinstance(loss, Ref) or any(loss.value in instruction.inputs for instruction in local.instructions):
        return None
    match [instruction for instruction in local.instructions if loss.value in instruction.outputs]:
        case [Reshard(differentiable=True, there=there) as summing] if only_sums(there.steps):
            return summing
    return None


def comes_late(program: Program, steps: Sequence[ReshardStep]) -> bool:
    """Tell whether nothing in a step waits for the loss: no op reads it, and `steps` only sum it over ranks."""
    return program.num_runs == 1 and only_sums(steps) and not program.loss.consumers


def late(compute: BoundCall, summing: Reshard) -> BoundCall:
    """Return the call of the instruction that sums the loss: `compute`, unless the run takes the value late."""
    source, result, there, back = summing.source, summing.result, summing.there, summing.back

    def call(env: dict[int, Any], state: RunState) -> None:
        if state.late is None:
            compute(env, state)
        else:
            env[result] = _LateSum.apply(env[source], there, back, state.late)

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
