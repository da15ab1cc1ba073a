"""Runs ops that draw random numbers or depend on training mode, so that every rank and every rerun agrees.

Random numbers depend on the seed, the step and the op's place. Along mesh axes that split an op's loops the ranks draw
different numbers, along all others the same ones, so replicated activations stay replicated; a rerun draws what the
first run drew. Buffers are written in training alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..ops import find
from ..ops.local import replace_arg
from ..program.drawing import argument_place, draws, needs_state
from ..program.program import Op
from ..torch_internals import private
from .instructions import Compute
from .run_state import RunState

WithState = Callable[..., Any]
_OWN_NAMESPACES = ("aten", "prims", "autograd_functions")
"""The namespaces of ops whose tags tell whether they draw random numbers."""


def derived_seed(*parts: Any) -> int:
    """Return a 63-bit seed that depends on all `parts`, the same wherever they are the same.

    >>> derived_seed(0, "a") == derived_seed(0, "a") != derived_seed(0, "b")
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def with_state(instruction: Compute, coords: Sequence[int]) -> WithState | None:
    """Return the instruction's function with the run's state as first argument, for ops that need it; None for others.

    An op of the user's may draw random numbers without saying so, and is run as if it did.
    """
    op, function = instruction.op, instruction.function
    place = (instruction.key, tuple(coords[axis] for axis in instruction.axes))
    if instruction.sampled is not None:
        return _sampling(function, instruction.sampled, place)
    if not needs_state(op):
        return _drawing(function, place) if _is_foreign(op) else None
    rule = find(op.name)
    if rule.masks:
        return _dropout(place)
    drawing = _drawing(function, place) if draws(op) or _is_foreign(op) else _plain(function)
    if rule.training is not None:
        return _switched(drawing, "training", (op.node.target, *rule.training))
    if rule.dropout is not None:
        return _switched(drawing, "dropout", (op.node.target, *rule.dropout))
    return _writing(drawing, op.node.target) if op.writes else drawing


def _is_foreign(op: Op) -> bool:
    namespace = private.namespace(op.node.target)
    return bool(namespace) and namespace not in _OWN_NAMESPACES


def _dropout(place: tuple[Any, ...]) -> WithState:
    def dropout(state: RunState, x: Tensor, p: float, train: bool) -> Tensor:
        if not (state.training and state.dropout and train) or p == 0:
            return x
        mask = _drawn(torch.empty_like(x, dtype=torch.bool), state, place, p)
        return _Masked.apply(x, mask, 1 / (1 - p) if p < 1 else 0.0)

    return dropout


def mask_of(instruction: Compute, coords: Sequence[int], state: RunState, device: torch.device) -> Tensor | None:
    """Return the mask by which an op that is dropout and nothing else (`masks_alone`) multiplies; None where it drops nothing."""
    _, p, train = instruction.args
    if not (state.training and state.dropout and train) or p == 0:
        return None
    place = (instruction.key, tuple(coords[axis] for axis in instruction.axes))
    return _drawn(torch.empty(instruction.op.outputs[0].shape, dtype=torch.bool, device=device), state, place, p)


def masks_alone(instruction: Compute) -> bool:
    """Tell whether an op is `dropout(x, p, train)`, a multiplication by a mask that can be drawn before."""
    return find(instruction.op.name).masks and not instruction.gives_several and len(instruction.args) == 3


def masked(x: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Return `x` where `mask` is true, scaled up by what is dropped; `x` itself without a mask."""
    return x if mask is None else x * mask * (1 / (1 - p) if p < 1 else 0.0)


def _drawn(mask: Tensor, state: RunState, place: tuple[Any, ...], p: float) -> Tensor:
    generator = torch.Generator(device=mask.device)
    generator.manual_seed(derived_seed(*state.draw, place))
    return mask.bernoulli_(1 - p, generator=generator)


class _Masked(torch.autograd.Function):
    """Computes `x · mask · scale`; its backward needs the mask alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grads[0] * mask).mul_(ctx.scale), None, None


def _sampling(exact: Callable[..., Any], sampled: Callable[..., Any], place: tuple[Any, ...]) -> WithState:
    """Compute a linear map in its sampled form in training; its rows are drawn anew in each step, and alike in a rerun."""

    def compute(state: RunState, *args: Any, **kwargs: Any) -> Any:
        if not (state.training and state.sampling and torch.is_grad_enabled()):
            return exact(*args, **kwargs)
        generator = torch.Generator(device=args[0].device)
        generator.manual_seed(derived_seed(*state.draw, place))
        return sampled(*args, **kwargs, generator=generator)

    return compute


def _switched(function: WithState, mode: Literal["training", "dropout"], off: tuple[Any, str, Any]) -> WithState:
    """Set the argument of `off` (op, name, value) to that value in runs without training, or without dropout."""

    def switched(state: RunState, *args: Any, **kwargs: Any) -> Any:
        if not (state.training and (mode == "training" or state.dropout)):
            args, kwargs = _switched_off(off, args, kwargs)
        return function(state, *args, **kwargs)

    return switched


def without_dropout(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `op` with its dropout switched off, if it has any."""
    off = find(op.name).dropout
    return (args, kwargs) if off is None else _switched_off((op.node.target, *off), args, kwargs)


def _switched_off(off: tuple[Any, str, Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of an op with the one of `off` (op, name, value) set to that value."""
    target, name, value = off
    return replace_arg(args, kwargs, argument_place(target, name), name, value)


def _plain(function: Callable[..., Any]) -> WithState:
    return lambda state, *args, **kwargs: function(*args, **kwargs)


def _writing(function: WithState, target: Any) -> WithState:
    """Let an op write its buffers in training alone; in evaluation it returns the buffer unchanged, or writes copies."""
    names = [name for name, _, _ in private.arguments(target)]
    returned, written = private.returned_argument(target), private.mutated_arguments(target)

    def write(state: RunState, *args: Any, **kwargs: Any) -> Any:
        if state.training:
            return function(state, *args, **kwargs)
        named = {**dict(zip(names, args)), **kwargs}
        if returned is not None:
            return named[returned]
        copies = {name: _cloned(value) if name in written else value for name, value in named.items()}
        return function(
            state, *(copies[name] for name in names[: len(args)]), **{name: copies[name] for name in kwargs}
        )

    return write


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else [_cloned(each) for each in value] if value else value


def _drawing(function: Callable[..., Any], place: tuple[Any, ...]) -> WithState:
    def draw(state: RunState, *args: Any, **kwargs: Any) -> Any:
        return _under_seed(derived_seed(*state.draw, place), function, args, kwargs)

    return draw


def _under_seed(seed: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the default generators seeded, and restore their states."""
    devices = sorted({arg.device.index or 0 for arg in args if isinstance(arg, Tensor) and arg.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return function(*args, **kwargs)
