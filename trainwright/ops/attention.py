"""Fused attention: samples and heads are independent; queries too, unless the mask depends on their position."""

from __future__ import annotations

from .registry import rule
from .signature import Call, Dims, Signature, SignatureBuilder


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Signature | None:
    """`b* (g r) q d, b* g k d, b* g k e, [b* (g r) q k] -> b* (g r) q e`; keys stay whole."""
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
    q = builder.loop("q", query.shape[-2], whole=causal)
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
    return builder.build(ins, [(*lead, heads, q, e) for _ in (out,)])
