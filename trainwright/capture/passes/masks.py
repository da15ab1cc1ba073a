"""Restore what exported attention has lost: `is_causal` in place of an explicit mask, `enable_gqa` of repeated heads.

Exported Hugging Face models carry the causal mask as a tensor of batch times sequence² elements, and keys and values
repeated for every query head. Both would be kept for the backward, and rule out the fused kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .common import Context, aten, bound, calls, emit, is_call, replace, shape
from .constants import Causal, Value, evaluate_constants, uniform


def restore_attention(graph: fx.Graph, context: Context) -> None:
    """Rewrite every `scaled_dot_product_attention` to its leanest equal form, the first six arguments spelt out."""
    attentions = calls(graph, "scaled_dot_product_attention")
    masks = [mask for node in attentions if isinstance(mask := bound(node)["attn_mask"], fx.Node)]
    values = evaluate_constants(graph, dict.fromkeys(masks), context.constants)
    for node in attentions:
        named = bound(node)
        _lean_mask(named, values.get(named["attn_mask"]))
        _lean_heads(named)
        _rewrite(node, named, context)


def _lean_mask(named: dict[str, Any], mask: Value | None) -> None:
    """Drop a mask that hides nothing; turn a causal one into `is_causal`."""
    if mask is None or named["is_causal"]:
        return
    if hides_nothing(mask):
        named["attn_mask"] = None
    elif shape(named["query"])[-2] == shape(named["key"])[-2] and is_causal(mask):
        named["attn_mask"], named["is_causal"] = None, True


def hides_nothing(mask: Value) -> bool:
    """True for a boolean mask that is True, or an additive one that is 0, everywhere."""
    element = uniform(mask)
    return element is not None and _shows(element)


def is_causal(mask: Value) -> bool:
    """True when the mask shows exactly the columns up to the row's own."""
    if isinstance(mask, Causal):
        return _shows(mask.inside) and _hides(mask.outside)
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    square = _one_square(mask)
    if square is None:
        return False
    size = square.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool).tril()
    if square.dtype == torch.bool:
        return bool(torch.equal(square, lower))
    return bool((square[lower] == 0).all()) and bool((square[~lower] <= _lowest(square.dtype)).all())


def _one_square(mask: Tensor) -> Tensor | None:
    """The last two dims of a mask that does not vary in the others."""
    leading = mask.shape[:-2]
    if any(size > 1 and stride != 0 for size, stride in zip(leading, mask.stride())):
        return None
    return mask[(0,) * len(leading)]


def _shows(element: Tensor) -> bool:
    return bool(element) if element.dtype == torch.bool else bool(element == 0)


def _hides(element: Tensor) -> bool:
    return not bool(element) if element.dtype == torch.bool else bool(element <= _lowest(element.dtype))


def _lowest(dtype: torch.dtype) -> float:
    """What models add to hide a position: the lowest number of the mask's type, or minus infinity."""
    return torch.finfo(dtype).min


def _lean_heads(named: dict[str, Any]) -> None:
    """Read keys and values before they were repeated for the query heads that share them."""
    key, value = repeated_from(named["key"]), repeated_from(named["value"])
    if key is None or value is None or shape(key)[-3] != shape(value)[-3] or named["enable_gqa"]:
        return
    named.update(key=key, value=value, enable_gqa=True)


def repeated_from(heads: fx.Node) -> fx.Node | None:
    """Return x of [b, g, s, d] when `heads`, [b, g·r, s, d], repeats each of its g heads r times; else None."""
    if is_call(heads, "repeat_interleave") and bound(heads).get("dim") in (1, -3):
        source = heads.args[0]
        whole = isinstance(heads.args[1], int) and len(shape(source)) == 4
        return source if whole else None  # type: ignore[return-value]
    if not is_call(heads, "reshape") or not is_call(heads.args[0], "expand"):
        return None
    expanded: fx.Node = heads.args[0]  # type: ignore[assignment]
    inserted: fx.Node = expanded.args[0]  # type: ignore[assignment]
    if not is_call(inserted, "unsqueeze") or len(shape(heads)) != 4:
        return None
    source = inserted.args[0]
    batch, groups, *rest = shape(source)
    fits = shape(inserted) == (batch, groups, 1, *rest) and shape(expanded)[:2] == (batch, groups)
    return source if fits and shape(heads) == (batch, shape(expanded)[2] * groups, *rest) else None  # type: ignore[return-value]


def _rewrite(node: fx.Node, named: dict[str, Any], context: Context) -> None:
    args = tuple(named[name] for name in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"))
    kwargs = {name: named[name] for name in ("scale", "enable_gqa") if named[name] not in (None, False)}
    replace(node, emit(context, node, aten.scaled_dot_product_attention.default, args, like=node, **kwargs))
