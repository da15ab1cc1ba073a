"""Fused attention: samples and heads are independent, and so are queries, each rank with rows of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .attention_rows import Swap, causal_rows
from .local import LocalContext
from .registry import rule
from .signature import Call, Dims, Signature, SignatureBuilder


def _localize(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not ctx.in_shape(0)[-3]:
        return _without_heads, args[:4], {}
    is_causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    if not is_causal or not ctx.split("q"):
        return target, args, kwargs
    query, key, value = args[:3]
    kwargs = {name: value for name, value in kwargs.items() if name in ("scale", "enable_gqa")}
    mirrors = ctx.mirrors_of("q")
    swap = Swap(tuple(mirror.group for mirror in mirrors), (ctx.range_of("q"), *(mirror.range for mirror in mirrors)))
    return partial(causal_rows, swap=swap), (query, key, value), kwargs


def _without_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Return the result of a rank that has no head, so that nothing of it is dropped.

    The kernel for CPUs of torch 2.11 divides by the number of heads. A mask that is added takes part: the rank has to meet the
    others in the backward of a mask that is learned.
    """
    weights = query @ key.transpose(-2, -1)
    if mask is not None and mask.is_floating_point():
        weights = weights + mask
    return weights @ value


@rule("scaled_dot_product_attention", localize=_localize)
def attention(call: Call) -> Signature | None:
    """`b* (g r) q d, b* g k d, b* g k e, [b* (g r) q k] -> b* (g r) q e`; keys stay whole.

    Under a causal mask a rank's rows see other keys than those of the next: they are cut in consecutive parts, of which the ranks
    swap halves. They stay whole where weights are dropped, or queries and keys are not as many.
    """
    query, key, value = call.inputs[:3]
    out = call.outputs[0]
    if len(query.shape) < 3 or len(query.shape) != len(key.shape):
        return None
    builder = SignatureBuilder()
    lead = tuple(builder.loop(f"b{k}", n) for k, n in enumerate(query.shape[:-3]))
    groups, repeats = key.shape[-3], query.shape[-3] // max(1, key.shape[-3])
    shared = bool(call.kwargs.get("enable_gqa")) and repeats > 1
    g = builder.loop("h", groups) if shared or groups == query.shape[-3] else ()
    r = builder.loop("r", repeats, whole=True) if shared else ()
    if groups not in (1, query.shape[-3]) and not shared:
        return None
    heads = g + r if shared or groups == query.shape[-3] else builder.loop("h", query.shape[-3])
    causal = bool(call.arg(5, "is_causal", False))
    refusal = _why_whole(call) if causal else ""
    if refusal:
        builder.reasons["q"] = refusal
    q = builder.loop("q", query.shape[-2], whole=bool(refusal))
    k, d, e = (
        builder.loop(name, size, whole=True)
        for name, size in (("k", key.shape[-2]), ("d", query.shape[-1]), ("e", value.shape[-1]))
    )
    key_lead = tuple(entry if n != 1 else () for entry, n in zip(lead, key.shape[:-3]))
    ins: list[Dims] = [(*lead, heads, q, d), (*key_lead, g, k, d), (*key_lead, g, k, e)]
    if len(call.inputs) > 3:
        full = (*lead, heads, q, k)
        mask = call.inputs[3].shape
        ins.append(tuple(full[len(full) - len(mask) + i] if n != 1 else () for i, n in enumerate(mask)))
    along = ["q"] if causal else []
    return builder.build(ins, [(*lead, heads, q, e) for _ in (out,)], joint=along, ordered=along)


def _why_whole(call: Call) -> str:
    """Return why a rank's rows of causal attention can't be computed for themselves; empty where they can."""
    query, key = call.inputs[:2]
    heads, groups = query.shape[-3], key.shape[-3]
    if call.arg(4, "dropout_p", 0.0):
        return "causal attention that drops weights takes all queries; build the model without attention dropout"
    if query.shape[-2] != key.shape[-2]:
        return "causal attention of queries that are not as many as the keys takes them all"
    if query.shape[:-3] != key.shape[:-3] or not (heads == groups or call.kwargs.get("enable_gqa")):
        return "causal attention whose samples or heads share keys by broadcasting takes all queries"
    return ""
