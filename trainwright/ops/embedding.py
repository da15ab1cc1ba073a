"""Lookups in a table: by rows of a vocabulary that may be split."""

from __future__ import annotations

from typing import Any

from . import partial
from .local import LocalContext
from .registry import rule
from .signature import Call, Signature, SignatureBuilder


def _local_embedding(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Rows that another rank holds contribute zero; the sum over the ranks is the lookup."""
    if not ctx.split("v"):
        return target, args, kwargs
    start, stop = ctx.range_of("v")
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)

    def lookup(weight: Any, indices: Any) -> Any:
        return partial.embedding_of_range(weight, indices, start, stop, padding)

    return lookup, args[:2], {}


@rule("embedding", localize=_local_embedding)
def embedding(call: Call) -> Signature:
    """`v m, b* -> b* m`; the vocabulary `v` is a reduced loop.

    Gradients that are divided by how often a row was looked up need all lookups: the features alone are split.
    """
    builder = SignatureBuilder()
    weight, indices = call.inputs
    counts = bool(call.arg(3, "scale_grad_by_freq", False))
    v, m = builder.loop("v", weight.shape[0], whole=counts), builder.loop("m", weight.shape[1])
    lead = tuple(builder.loop(f"b{k}", n, whole=counts) for k, n in enumerate(indices.shape))
    return builder.build([(v, m), lead], [(*lead, m)], ["v"])


@rule("embedding_bag")
def embedding_bag(call: Call) -> Signature:
    """`v m, n, o -> b m, …`: sums of rows are independent over the features alone, since a bag may be anywhere in the indices."""
    builder = SignatureBuilder()
    weight, *others = call.inputs
    m = builder.loop("m", weight.shape[1])

    def whole(shape: tuple[int, ...], tag: str) -> tuple[Any, ...]:
        return tuple(builder.loop(f"{tag}{k}", size, whole=True) for k, size in enumerate(shape))

    ins = [(builder.loop("v", weight.shape[0], whole=True), m)]
    ins += [whole(spec.shape, f"i{place}_") for place, spec in enumerate(others)]
    outs = [whole(spec.shape, f"o{place}_") for place, spec in enumerate(call.outputs)]
    by_feature = [len(spec.shape) == 2 for spec in call.outputs]  # the sums, and the rows of the largest entries
    return builder.build(ins, [(dims[0], m) if is_own else dims for dims, is_own in zip(outs, by_feature)])
