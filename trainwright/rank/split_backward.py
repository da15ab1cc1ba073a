"""Splits the backward of linear maps: input gradients come at once, weight gradients, which no other stage needs, later.

    y = x · Wᵀ + b     backward    dx = dy · W,  db = Σ dy      at once
                       later       dW = dyᵀ · x                 from x and dy, which are held until then

Only linear maps by a parameter (at rest, gathered, or cast) are split; every other gradient is computed at once. The terms of a
gradient and their order over micro-batches are the same as without a split, so gradients are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..ops import find
from ..program.program import Op
from ..program.sampling import is_of_param
from .execute import Executor
from .instructions import Compute, Ref
from .run_state import RunState


def waits(op: Op) -> bool:
    """Tell whether the op's weight gradient may be postponed: it is a linear map by a parameter, and its input needs a gradient."""
    if find(op.name).linear_map is None or len(op.inputs) < 2:
        return False
    x, weight = op.inputs[:2]
    return x.requires_grad and weight.requires_grad and is_of_param(weight)


@dataclass(eq=False)
class _Due:
    """The operands of one weight gradient that is still to be computed."""

    weight: GradientEdge
    input_first: bool
    x: Tensor | None = None
    dy: Tensor | None = None


@dataclass(eq=False)
class LaterGradients:
    """The weight gradients that one micro-batch's backward has postponed."""

    due: list[_Due] = field(default_factory=list)

    def make(self) -> None:
        """Compute the gradients in the order of the backward, and free their operands."""
        due, self.due = self.due, []
        due.reverse()
        while due:
            one = due.pop()
            assert one.x is not None
            assert one.dy is not None
            x, dy = one.x.flatten(0, -2), one.dy.flatten(0, -2)
            torch.autograd.backward([one.weight], [x.t() @ dy if one.input_first else dy.t() @ x])
            del one, x, dy


def take_apart(executor: Executor) -> None:
    """Make the linear maps of a local program postpone their weight gradients to `RunState.later`, if that is set."""
    for instruction in executor.local.instructions:
        if isinstance(instruction, Compute) and waits(instruction.op) and _is_plain(instruction):
            executor.calls[instruction.index] = _apart(instruction, executor.calls[instruction.index])


def _is_plain(instruction: Compute) -> bool:
    """Tell whether the op gets its two tensors first, and is called as it is or with its bias added by one rank alone.

    A sampled map makes its weight's gradient from the rows it kept, and at once.
    """
    if instruction.sampled is not None:
        return False
    known = instruction.function is instruction.op.node.target or hasattr(instruction.function, "retargeted")
    return known and all(type(arg) is Ref for arg in instruction.args[:2])


def _apart(instruction: Compute, plain: Callable[..., None]) -> Callable[..., None]:
    x_at, weight_at = (arg.value for arg in instruction.args[:2])
    rest, kwargs, (output,) = instruction.args[2:], instruction.kwargs, instruction.outputs
    target, function = instruction.op.node.target, instruction.function
    input_first = find(instruction.op.name).linear_map == "in_out"

    def call(env: dict[int, Any], state: RunState) -> None:
        if state.later is None or not torch.is_grad_enabled():
            plain(env, state)
            return
        due = _Due(get_gradient_edge(env[weight_at]), input_first)
        later = state.later

        def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            found: Tensor = _Linear.apply(x, weight.detach(), bias, target, due, later)
            return found

        own = function.retargeted(product) if hasattr(function, "retargeted") else product
        more = [env[arg.value] if type(arg) is Ref else arg for arg in rest]
        named = {name: env[arg.value] if type(arg) is Ref else arg for name, arg in kwargs.items()}
        env[output] = own(env[x_at], env[weight_at], *more, **named)

    return call


class _Linear(torch.autograd.Function):
    """A linear map whose backward returns the gradients of input and bias, and saves the operands of the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Any, due: _Due, later: LaterGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.due, ctx.later = due, later
        y: Tensor = target(x, weight, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        due, ctx.due = ctx.due, None
        due.x, due.dy = x, dy
        ctx.later.due.append(due)
        dx = dy @ (weight.t() if due.input_first else weight)
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None, None
