"""Random ops and modes: masks that depend on a seed and a place, not on which rank draws them.

Along mesh axes that split an op's loops the ranks draw different numbers, along all others the same ones, so replicated
activations stay replicated; and a rerun draws what the first run drew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.local import replace_arg

if TYPE_CHECKING:
    from .execute import RunState
    from .local import Instruction
    from .program import Op

WithState = Callable[..., Any]
DRAWING = {
    "rand_like",
    "randn_like",
    "bernoulli",
    "randint_like",
    "rrelu",
    "alpha_dropout",
    "feature_dropout",
    "rand",
    "randn",
}


def derived_seed(*parts: Any) -> int:
    """Return a 63-bit seed that depends on all `parts`, the same wherever they are the same.

    >>> derived_seed(0, "a") == derived_seed(0, "a") != derived_seed(0, "b")
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def needs_state(op: Op) -> bool:
    """Tell whether an op draws numbers or knows modes."""
    if op.name == "scaled_dot_product_attention":
        return bool(op.call.arg(4, "dropout_p", 0.0))
    if op.name == "batch_norm":
        return bool(op.call.arg(5, "training", False))
    return op.name in ("dropout", "native_dropout") or op.name in DRAWING


def with_state(instruction: Instruction, coords: Sequence[int]) -> WithState | None:
    """Return the instruction's function with the run's state in front, for ops that draw numbers or know modes."""
    if instruction.op is None or not needs_state(instruction.op):
        return None
    place = (instruction.key, tuple(coords[axis] for axis in instruction.axes))
    match instruction.op.name:
        case "dropout" | "native_dropout":
            return _dropout(place)
        case "scaled_dot_product_attention":
            return _attention(instruction.function, place)
        case "batch_norm":
            return _batch_norm(instruction.function)
    return _drawing(instruction.function, place)


def _dropout(place: tuple[Any, ...]) -> WithState:
    def dropout(state: RunState, x: Tensor, p: float, train: bool) -> Tensor:
        if not (state.training and state.dropout and train) or p == 0:
            return x
        generator = torch.Generator(device=x.device)
        generator.manual_seed(derived_seed(*state.draw, place))
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
        return _Masked.apply(x, mask, 1 / (1 - p) if p < 1 else 0.0)

    return dropout


class _Masked(torch.autograd.Function):
    """`x · mask · scale`, of which the backward needs the mask alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grads[0] * mask).mul_(ctx.scale), None, None


def _attention(function: Callable[..., Any], place: tuple[Any, ...]) -> WithState:
    def attention(state: RunState, *args: Any, **kwargs: Any) -> Any:
        if not (state.training and state.dropout):
            args, kwargs = replace_arg(args, kwargs, 4, "dropout_p", 0.0)
            return function(*args, **kwargs)
        return _under_seed(derived_seed(*state.draw, place), function, args, kwargs)

    return attention


def _batch_norm(function: Callable[..., Any]) -> WithState:
    def batch_norm(state: RunState, *args: Any, **kwargs: Any) -> Any:
        if not state.training:
            args, kwargs = replace_arg(args, kwargs, 5, "training", False)
        return function(*args, **kwargs)

    return batch_norm


def _drawing(function: Callable[..., Any], place: tuple[Any, ...]) -> WithState:
    def draw(state: RunState, *args: Any, **kwargs: Any) -> Any:
        return _under_seed(derived_seed(*state.draw, place), function, args, kwargs)

    return draw


def _under_seed(seed: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the default generators seeded, and put them back."""
    devices = sorted({arg.device.index or 0 for arg in args if isinstance(arg, Tensor) and arg.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return function(*args, **kwargs)
