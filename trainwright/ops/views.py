"""Ops that only move, cut or repeat dims. They decide nothing: a layout passes through them loop by loop."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from .local import LocalContext, local_size, replace_arg
from .registry import rule
from .signature import Call, Dims, Signature, SignatureBuilder, regroup


def same_dims(shape: Sequence[int], builder: SignatureBuilder, whole: Sequence[int] = (), prefix: str = "d") -> Dims:
    """Name every dim of `shape` after its position; those in `whole` are never split."""
    return tuple(builder.loop(f"{prefix}{dim}", size, whole=dim in whole) for dim, size in enumerate(shape))


def _local_unflatten(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    count = len(ctx.out_shape()) - len(ctx.in_shape(0)) + 1
    dim %= len(ctx.in_shape(0))
    args, kwargs = replace_arg(args, kwargs, 2, "sizes", list(ctx.out_shape()[dim : dim + count]))
    return target, args, kwargs


@rule("unflatten", kind="view", localize=_local_unflatten)
@rule("flatten", kind="view")
@rule("reshape", "view", "_unsafe_view", "_reshape_alias", kind="view", localize=local_size(1, "size"))
def reshape(call: Call) -> Signature | None:
    """`(a b) c -> a (b c)`: the atomic factors of both shapes; dims without common factors stay whole."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    if math.prod(source) == 0:
        return None
    # Equal leading dims first: (6, 4) -> (6, 2, 2) even where the rest has no common refinement.
    builder = SignatureBuilder()
    lead = 0
    while lead < min(len(source), len(target)) and source[lead] == target[lead]:
        lead += 1
    head = same_dims(source[:lead], builder, prefix="l")
    rest = regroup(source[lead:], target[lead:])
    if rest is None:
        ins, outs = builder.opaque("i", source[lead:]), builder.opaque("o", target[lead:])
    else:
        sizes, ins, outs = rest
        builder.sizes.update(sizes)
    return builder.build([head + ins], [head + outs])


@rule("view_as", "reshape_as", kind="view")
def view_as(call: Call) -> Signature | None:
    """As `reshape`; the second tensor only lends its shape."""
    return None


@rule("permute", kind="view")
def permute(call: Call) -> Signature:
    """`d0 d1 d2 -> d2 d0 d1`."""
    builder = SignatureBuilder()
    dims = same_dims(call.inputs[0].shape, builder)
    return builder.build([dims], [tuple(dims[axis % len(dims)] for axis in call.arg(1, "dims", ()))])


@rule("transpose", "swapaxes", "swapdims", "t", "mT", "numpy_T", "adjoint", kind="view")
def transpose(call: Call) -> Signature:
    """`d0 d1 -> d1 d0`."""
    builder = SignatureBuilder()
    dims = list(same_dims(call.inputs[0].shape, builder))
    ins = tuple(dims)
    if len(dims) > 1:
        first, second = call.arg(1, "dim0", -2) % len(dims), call.arg(2, "dim1", -1) % len(dims)
        if call.name in ("t", "mT", "adjoint"):
            first, second = len(dims) - 2, len(dims) - 1
        dims[first], dims[second] = dims[second], dims[first]
        if call.name == "numpy_T":
            dims = list(reversed(ins))
    return builder.build([ins], [tuple(dims)])


@rule("movedim", kind="view")
def movedim(call: Call) -> Signature:
    """Moves dims to new places."""
    builder = SignatureBuilder()
    dims = same_dims(call.inputs[0].shape, builder)
    as_list = lambda value: [value] if isinstance(value, int) else list(value)  # noqa: E731
    source = [axis % len(dims) for axis in as_list(call.arg(1, "source"))]
    target = [axis % len(dims) for axis in as_list(call.arg(2, "destination"))]
    rest = iter(axis for axis in range(len(dims)) if axis not in source)
    order = [source[target.index(axis)] if axis in target else next(rest) for axis in range(len(dims))]
    return builder.build([dims], [tuple(dims[axis] for axis in order)])


@rule("unsqueeze", "squeeze", "alias", "detach", "detach_", "lift_fresh", kind="view")
def same_order(call: Call) -> Signature:
    """Dims of size 1 come and go; the others keep their order."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    names = iter(builder.loop(f"d{index}", size) for index, size in enumerate(s for s in shape if s != 1))
    dims = [next(names) if size != 1 else () for size in shape]
    kept = iter(dim for dim in dims if dim)
    return builder.build([tuple(dims)], [tuple(next(kept, ()) if size != 1 else () for size in out)])


@rule("view_as_real", "view_as_complex", kind="view")
def pairs_of_parts(call: Call) -> Signature:
    """The real and the imaginary part, along the last dim of the real tensor, stay together."""
    builder = SignatureBuilder()
    is_made = call.name == "view_as_complex"
    dims = same_dims((call.outputs if is_made else call.inputs)[0].shape, builder)
    parts = (*dims, builder.loop("part", 2, whole=True))
    return builder.build([parts if is_made else dims], [dims if is_made else parts])


@rule("expand", "broadcast_to", "expand_copy", kind="view", localize=local_size(1, "size"))
def expand(call: Call) -> Signature:
    """`1 d1 -> n d1`: the repeated dims are loops that the operand lacks, so its gradient is summed over them."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    offset = len(out) - len(shape)
    outs = same_dims(out, builder)
    ins = tuple(outs[offset + dim] if size == out[offset + dim] else () for dim, size in enumerate(shape))
    return builder.build([ins], [outs])


@rule("expand_as", kind="view")
def expand_as(call: Call) -> Signature:
    """As `expand`; the second tensor lends its shape, and is split as the output is."""
    found = expand(call)
    assert found is not None
    return replace(found, inputs=(*found.inputs, found.outputs[0]))


@rule("slice", "select", "narrow", "slice_copy", "select_copy", kind="view")
def cut(call: Call) -> Signature:
    """Takes a part of one dim, which stays whole; all others pass."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    dim = call.arg(1, "dim", 0) % len(shape)
    unchanged = len(out) == len(shape) and out[dim] == shape[dim]
    ins = tuple(
        builder.loop(f"d{k}", n) if k != dim or unchanged else builder.loop(f"x{k}", n, whole=True)
        for k, n in enumerate(shape)
    )
    if len(out) < len(shape):
        return builder.build([ins], [ins[:dim] + ins[dim + 1 :]])
    middle = ins[dim] if unchanged else builder.loop(f"y{dim}", out[dim], whole=True)
    return builder.build([ins], [(*ins[:dim], middle, *ins[dim + 1 :])])


def _local_sections(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Equal sections of a dim whose minor factors are split: each section shrinks alike."""
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    sections: Any = args[1] if len(args) > 1 else kwargs.get("split_size", kwargs.get("split_sizes"))
    local: Any
    dim %= len(ctx.global_shape(0))
    share = (ctx.in_shape(0)[dim], ctx.global_shape(0)[dim])
    if isinstance(sections, int) and not share[0]:  # a size alone would give one section of an empty part
        target, local = torch.ops.aten.split_with_sizes.default, [0] * (share[1] // sections)
    elif isinstance(sections, int):
        local = sections * share[0] // share[1]
    else:
        local = [size * share[0] // share[1] for size in sections]
    args, kwargs = replace_arg(args, kwargs, 1, "split_size", local)
    return target, args, kwargs


@rule("split", "split_with_sizes", kind="view", localize=_local_sections)
def split(call: Call) -> Signature:
    """`(n x) -> x, x, …`: cuts a dim into equal sections; a split of what is inside a section passes."""
    return _sections(call, call.arg(2, "dim", 0))


@rule("chunk", "tensor_split", "unsafe_chunk", kind="view")
def chunk(call: Call) -> Signature:
    """As `split`, by count: the count does not depend on the split."""
    return _sections(call, call.arg(2, "dim", 0))


def _sections(call: Call, dim: int) -> Signature:
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    dim %= len(shape)
    sizes = {spec.shape[dim] for spec in call.outputs}
    dims = list(same_dims(shape, builder))
    builder.sizes.pop(f"d{dim}", None)
    if len(sizes) == 1 and len(call.outputs) * min(sizes) == shape[dim]:
        inner = builder.loop("x", min(sizes))
        dims[dim] = builder.loop("n", len(call.outputs), whole=True) + inner
        outs = [(*dims[:dim], inner, *dims[dim + 1 :]) for _ in call.outputs]
    else:
        dims[dim] = builder.loop("n", shape[dim], whole=True)
        outs = [
            (*dims[:dim], builder.loop(f"y{k}", spec.shape[dim], whole=True), *dims[dim + 1 :])
            for k, spec in enumerate(call.outputs)
        ]
    return builder.build([tuple(dims)], outs)


@rule("unbind", kind="view")
def unbind(call: Call) -> Signature:
    """Cuts a dim into its entries."""
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    dim = call.arg(1, "dim", 0) % len(shape)
    dims = same_dims(shape, builder, whole=(dim,))
    return builder.build([dims], [dims[:dim] + dims[dim + 1 :] for _ in call.outputs])


@rule("cat", "concat", "concatenate", kind="elementwise")
def cat(call: Call) -> Signature:
    """Joins along one dim, which stays whole on both sides."""
    builder = SignatureBuilder()
    out = call.outputs[0].shape
    dim = call.arg(1, "dim", 0) % len(out)
    outs = tuple(builder.loop(f"d{k}", n, whole=k == dim) for k, n in enumerate(out))
    ins = []
    for index, spec in enumerate(call.inputs):
        if len(spec.shape) != len(out):
            ins.append(builder.opaque(f"e{index}_", spec.shape))
            continue
        own = builder.loop(f"x{index}", spec.shape[dim], whole=True)
        ins.append((*outs[:dim], own, *outs[dim + 1 :]))
    return builder.build(ins, [outs])


@rule("stack", kind="elementwise")
def stack(call: Call) -> Signature:
    """Joins along a new dim, which stays whole."""
    builder = SignatureBuilder()
    out = call.outputs[0].shape
    dim = call.arg(1, "dim", 0) % len(out)
    outs = same_dims(out, builder, whole=(dim,))
    return builder.build([outs[:dim] + outs[dim + 1 :] for _ in call.inputs], [outs])


@rule(
    "flip",
    "roll",
    "fft_fftshift",
    "fft_ifftshift",
    "tril",
    "triu",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "diff",
    "sort",
    "argsort",
    "topk",
    kind="elementwise",
)
def along_dims(call: Call) -> Signature:
    """Works along some dims, which stay whole; the others pass."""
    return whole_along(_touched_dims(call, len(call.inputs[0].shape)), call)


def whole_along(dims: Collection[int], call: Call) -> Signature:
    """Return the signature of a call that works along `dims` of its first operand, whose sizes it may change."""
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    ins = tuple(builder.loop(f"x{k}" if k in dims else f"d{k}", n, whole=k in dims) for k, n in enumerate(shape))
    outs = [
        tuple(
            builder.loop(
                f"y{j}_{k}" if k in dims and n != shape[k] else (f"x{k}" if k in dims else f"d{k}"), n, whole=k in dims
            )
            for k, n in enumerate(spec.shape)
        )
        for j, spec in enumerate(call.outputs)
    ]
    return builder.build([ins, *(builder.opaque(f"e{i}_", s.shape) for i, s in enumerate(call.inputs[1:]))], outs)


def _touched_dims(call: Call, rank: int) -> set[int]:
    if call.name in ("tril", "triu"):
        return {rank - 2, rank - 1}
    position = {"flip": (1, "dims"), "roll": (2, "dims"), "diff": (2, "dim"), "topk": (2, "dim")}
    found = call.arg(*position.get(call.name, (1, "dim")))
    if found is None or isinstance(found, bool) or found == []:
        found = list(range(rank)) if call.name in ("roll", "fft_fftshift", "fft_ifftshift") else -1
    return {axis % rank for axis in ([found] if isinstance(found, int) else found)} if rank else set()


@rule("repeat", "tile", kind="elementwise")
def repeat(call: Call) -> Signature:
    """`x -> (n x)` per dim: the copies are outside, the operand's own entries inside."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    offset = len(out) - len(shape)
    ins = same_dims(shape, builder)
    outs = []
    for dim, size in enumerate(out):
        own = shape[dim - offset] if dim >= offset else 1
        inner = ins[dim - offset] if dim >= offset else ()
        outs.append(builder.loop(f"n{dim}", size // own, whole=True) + inner)
    return builder.build([ins], [tuple(outs)])


@rule("repeat_interleave", kind="elementwise")
def repeat_interleave(call: Call) -> Signature | None:
    """`x -> (x n)` along one dim."""
    repeats, dim = call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    builder = SignatureBuilder()
    ins = same_dims(call.inputs[0].shape, builder)
    dim %= len(ins)
    outs = (*ins[:dim], ins[dim] + builder.loop("n", repeats, whole=True), *ins[dim + 1 :])
    return builder.build([ins], [outs])


@rule("pad", "constant_pad_nd", kind="elementwise")
def pad(call: Call) -> Signature:
    """Widens some dims, which stay whole."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    ins = tuple(builder.loop(f"d{k}" if n == out[k] else f"x{k}", n, whole=n != out[k]) for k, n in enumerate(shape))
    outs = tuple(builder.loop(f"d{k}" if n == shape[k] else f"y{k}", n, whole=n != shape[k]) for k, n in enumerate(out))
    return builder.build([ins], [outs])


@rule("new_zeros", "new_ones", "new_full", "new_empty", kind="elementwise", localize=local_size(1, "size"))
def created(call: Call) -> Signature:
    """A fresh tensor; of the same shape as its model, it is split as that is.

    It is no view: of a model that is a partial sum, every rank would add its ones.
    """
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    outs = same_dims(out, builder)
    return builder.build([outs if shape == out else builder.opaque("i", shape)], [outs])


@rule("add_", "sub_", "mul_", "copy_", "fill_", "zero_")
def buffer_update(call: Call) -> Signature:
    """Writes a buffer, which every rank holds whole."""
    builder = SignatureBuilder()
    ins = [builder.opaque(f"i{k}_", spec.shape) for k, spec in enumerate(call.inputs)]
    return builder.build(ins, [builder.opaque("o", spec.shape) for spec in call.outputs])


@rule("unfold", kind="view")
def unfold(call: Call) -> Signature:
    """`d* x -> d* n s`: windows along one dim, which stays whole."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    dim = call.arg(1, "dimension", 0) % max(1, len(shape))
    dims = same_dims(shape, builder, whole=(dim,))
    windows, size = (builder.loop(name, size, whole=True) for name, size in (("n", out[dim]), ("s", out[-1])))
    return builder.build([dims], [(*dims[:dim], windows, *dims[dim + 1 :], size)])
