"""Sums, means and extrema. Sums over a split dim are partial; a mean is a sum over the whole count."""

from __future__ import annotations

import math
from typing import Any

from . import partial
from .local import LocalContext
from .registry import rule
from .signature import Call, Signature, SignatureBuilder


def _axes(call: Call, index: int = 1) -> set[int]:
    rank = len(call.inputs[0].shape)
    dim = call.arg(index, "dim")
    if dim is None or dim == [] or isinstance(dim, bool) or not isinstance(dim, (int, list, tuple)):
        return set(range(rank))
    return {axis % rank for axis in ([dim] if isinstance(dim, int) else dim)} if rank else set()


def _reduction(call: Call, axes: set[int], summed: bool, averaged: bool = False) -> Signature:
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    dims = tuple(builder.loop(f"d{k}", n, whole=k in axes and not summed) for k, n in enumerate(shape))
    outs = []
    for spec in call.outputs:
        kept = len(spec.shape) == len(shape) and len(shape) > 0
        outs.append(
            tuple(() if k in axes else dim for k, dim in enumerate(dims))
            if kept
            else tuple(dim for k, dim in enumerate(dims) if k not in axes)
        )
    return builder.build([dims], outs, [f"d{k}" for k in axes] if summed else [], averaged=averaged)


def _local_mean(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Sum of the rank's part over the count of the whole: the partial means add up exactly, uneven parts included."""
    shape = ctx.global_shape(0)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    axes = range(len(shape)) if dim in (None, []) else [dim] if isinstance(dim, int) else dim
    if not ctx.split(*(f"d{axis % len(shape)}" for axis in axes)):
        return target, args, kwargs
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    count = math.prod(shape[axis] for axis in axes)

    def partial_mean(x: Any) -> Any:
        return partial.mean_of_whole(x, tuple(axes), bool(keepdim), count, kwargs.get("dtype"))

    return partial_mean, args[:1], {}


@rule("mean", localize=_local_mean)
def mean(call: Call) -> Signature:
    """`d* -> ` without the averaged dims, which are reduced loops."""
    return _reduction(call, _axes(call), summed=True, averaged=True)


@rule("sum")
def total(call: Call) -> Signature:
    """`d* -> ` without the summed dims, which are reduced loops."""
    return _reduction(call, _axes(call), summed=True)


@rule("amax", "amin", "argmax", "argmin", "any", "all", "prod", "median", "mode", "kthvalue", kind="elementwise")
def extremum(call: Call) -> Signature:
    """As `sum`, but the reduced dims stay whole."""
    position = 2 if call.name == "kthvalue" else 1
    return _reduction(call, _axes(call, position), summed=False)


@rule("max", "min", kind="elementwise")
def max_or_min(call: Call) -> Signature:
    """Over all, over one dim, or of two tensors."""
    if len(call.inputs) == 2:
        from .elementwise import elementwise_signature

        return elementwise_signature(call)
    return _reduction(call, _axes(call), summed=False)


@rule("var", "std", "var_mean", "std_mean", kind="elementwise")
def spread(call: Call) -> Signature:
    """As `sum`, but the reduced dims stay whole."""
    return _reduction(call, _axes(call), summed=False)


@rule("norm", "linalg_vector_norm", kind="elementwise")
def vector_norm(call: Call) -> Signature:
    """As `sum`, but the reduced dims stay whole."""
    return _reduction(call, _axes(call, 2), summed=False)
