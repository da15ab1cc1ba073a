"""Fourier transforms. The dims that are transformed stay whole."""

from __future__ import annotations

from .registry import rule
from .signature import Call, Signature
from .views import whole_along

_NAMES = [f"fft_{inverse}{kind}fft" for kind in ("", "r", "h") for inverse in ("", "i")]


@rule(*_NAMES)
def along_one_dim(call: Call) -> Signature:
    """Transforms along one dim, by default the last."""
    return whole_along({call.arg(2, "dim", -1) % len(call.inputs[0].shape)}, call)


@rule(*(name + "2" for name in _NAMES), *(name + "n" for name in _NAMES))
def along_several_dims(call: Call) -> Signature:
    """Transforms along several dims, by default the last two, or for `n` as many as sizes are given, or all."""
    rank, sizes, dims = len(call.inputs[0].shape), call.arg(1, "s"), call.arg(2, "dim")
    if dims is None:
        num = 2 if call.name.endswith("2") else rank if sizes is None else len(sizes)
        dims = range(rank - num, rank)
    return whole_along({axis % rank for axis in dims}, call)
