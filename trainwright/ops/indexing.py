"""Gathers and scatters: the indexed dim stays whole."""

from __future__ import annotations

from .registry import rule
from .signature import Call, Signature, SignatureBuilder
from .views import same_dims


@rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce", kind="elementwise")
def gather(call: Call) -> Signature | None:
    """`d* x, d* y -> d* y`: dims of equal size other than the indexed one are loops."""
    builder = SignatureBuilder()
    shape, dim = call.inputs[0].shape, call.arg(1, "dim", 0)
    if not isinstance(dim, int) or not shape or any(len(s.shape) != len(shape) for s in (*call.inputs, *call.outputs)):
        return None
    dim %= len(shape)
    equal = [all(s.shape[k] == shape[k] for s in (*call.inputs, *call.outputs)) for k in range(len(shape))]

    def dims(spec_shape: tuple[int, ...], tag: str):
        return tuple(
            builder.loop(f"d{k}", n) if k != dim and equal[k] else builder.loop(f"{tag}{k}", n, whole=True)
            for k, n in enumerate(spec_shape)
        )

    ins = [dims(spec.shape, f"i{i}_") for i, spec in enumerate(call.inputs)]
    return builder.build(ins, [dims(spec.shape, f"o{i}_") for i, spec in enumerate(call.outputs)])


@rule("index_select")
def index_select(call: Call) -> Signature:
    """`d* x, n -> d* n`."""
    builder = SignatureBuilder()
    shape, dim = call.inputs[0].shape, call.arg(1, "dim", 0)
    dim %= len(shape)
    ins = tuple(builder.loop("x" if k == dim else f"d{k}", n, whole=k == dim) for k, n in enumerate(shape))
    n = (builder.loop("n", call.inputs[1].shape[0]) if call.inputs[1].shape else (),)
    return builder.build([ins, n], [(*ins[:dim], n[0], *ins[dim + 1 :])])


@rule("index")
def index(call: Call) -> Signature | None:
    """`x d*, n* -> n* d*`: indices into the leading dims are loops of the output; the indexed dims stay whole."""
    source, *indices = call.inputs
    places = call.arg(1, "indices", [])
    used = [k for k, entry in enumerate(places) if entry is not None]
    if (
        not used
        or used != list(range(used[0], used[0] + len(used)))
        or any(str(s.dtype) == "torch.bool" for s in indices)
    ):
        return None
    builder = SignatureBuilder()
    rank = max(len(spec.shape) for spec in indices)
    out = call.outputs[0].shape
    middle = out[used[0] : used[0] + rank]
    loops = tuple(builder.loop(f"n{k}", n) for k, n in enumerate(middle))
    dims = tuple(
        builder.loop(f"x{k}", n, whole=True) if k in used else builder.loop(f"d{k}", n)
        for k, n in enumerate(source.shape)
    )
    ins = [dims]
    for spec in indices:
        shift = rank - len(spec.shape)
        ins.append(tuple(loops[shift + k] if n == middle[shift + k] else () for k, n in enumerate(spec.shape)))
    return builder.build(ins, [(*dims[: used[0]], *loops, *dims[used[-1] + 1 :])])


@rule("index_add", "index_copy", "index_fill")
def scatter_rows(call: Call) -> Signature | None:
    """`d* x, n, d* n -> d* x`: adds to, or overwrites, indexed rows of one dim, which stays whole; the other dims are loops."""
    builder = SignatureBuilder()
    shape, (index, *sources) = call.inputs[0].shape, call.inputs[1:]
    if not shape or len(index.shape) != 1 or any(len(source.shape) not in (0, len(shape)) for source in sources):
        return None
    dim = call.arg(1, "dim", 0) % len(shape)
    dims, n = same_dims(shape, builder, whole=(dim,)), builder.loop("n", index.shape[0], whole=True)
    rows = (*dims[:dim], n, *dims[dim + 1 :])
    return builder.build([dims, (n,), *(rows if source.shape else () for source in sources)], [dims])


@rule("slice_scatter", "select_scatter", kind="elementwise")
def scatter_along(call: Call) -> Signature | None:
    """Writes into a part of one dim, which stays whole; the others pass."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    dim = call.arg(2, "dim", 0) % len(shape)
    if out != shape:
        return None
    dims = same_dims(shape, builder, whole=(dim,))
    source = call.inputs[1].shape
    if len(source) == len(shape):
        own = builder.loop("s", source[dim], whole=True)
        return builder.build([dims, (*dims[:dim], own, *dims[dim + 1 :])], [dims])
    return builder.build([dims, dims[:dim] + dims[dim + 1 :]], [dims])


@rule("one_hot")
def one_hot(call: Call) -> Signature:
    """`d* -> d* n`."""
    builder = SignatureBuilder()
    dims = same_dims(call.inputs[0].shape, builder)
    return builder.build([dims], [(*dims, builder.loop("n", call.outputs[0].shape[-1], whole=True))])
