"""Rules of products: linear layers batched, convolutions grouped, embeddings offset, attention with B in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .array import Fused, num_models, raw_of, rule, rules
from .rules_elementwise import aligned
from .streams import current


@rule("linear")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if type(weight) is not Fused:
        unbiased: Any = Fused(F.linear(x.raw, weight))
        return unbiased if bias is None else unbiased + bias
    if type(x) is not Fused:
        return _linear_of_shared(x, weight, bias)
    num, *shape = x.raw.shape
    rows = x.raw.reshape(num, -1, shape[-1])
    shift = bias.raw if type(bias) is Fused else None
    # under autocast the operations themselves are cast, and remember it for the backward
    multiply = _by_baddbmm if torch.is_autocast_enabled(rows.device.type) else _batched_linear
    found = multiply(rows, weight.raw, shift)
    product: Any = Fused(found.reshape(num, *shape[:-1], weight.raw.shape[1]))
    return product + bias if isinstance(bias, Tensor) and type(bias) is not Fused else product


def _by_baddbmm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    transposed = weight.transpose(1, 2)
    return torch.bmm(x, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, transposed)


class _BatchedLinear(torch.autograd.Function):
    """x [B, M, in], W [B, out, in], b [B, out] → x Wᵀ + b; the weight's gradient comes in its own order of memory.

    Through `baddbmm` it would come transposed, and be copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _by_baddbmm(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight), wanted = grads, ctx.saved_tensors, ctx.needs_input_grad
        of_x = torch.bmm(grad, weight) if wanted[0] else None
        of_weight = torch.bmm(grad.transpose(1, 2), x) if wanted[1] else None
        return of_x, of_weight, grad.sum(1) if ctx.has_bias and wanted[2] else None


_batched_linear = _BatchedLinear.apply


def _linear_of_shared(x: Tensor, weight: Fused, bias: Any) -> Fused:
    """One product of what all models see with all their weights: [.., B·out]."""
    num, num_out, num_in = weight.raw.shape
    flat_bias = None if bias is None else raw_of(bias, num).reshape(-1)
    found = F.linear(x, weight.raw.reshape(num * num_out, num_in), flat_bias)
    return Fused(found.unflatten(-1, (num, num_out)).movedim(-2, 0))


@rule("matmul", "__matmul__", "bmm", "mm")
def _matmul(x: Any, y: Any) -> Any:
    if min(x.dim(), y.dim()) < 2:
        return NotImplemented
    return Fused(torch.matmul(*aligned((x, y))))


@rule("__rmatmul__")
def _rmatmul(x: Any, y: Any) -> Any:
    return _matmul(y, x)


@rule("addmm")
def _addmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    num = num_models(bias, x, y)
    start = raw_of(bias, num)
    start = start.unsqueeze(1) if bias.dim() == 1 else start
    return Fused(torch.baddbmm(start, raw_of(x, num), raw_of(y, num), beta=beta, alpha=alpha))


def folded(raw: Tensor) -> Tensor:
    """Return [B, N, C, …] as [N, B·C, …]: no copy where memory has that order, as what a convolution gave.

    >>> made = folded(torch.zeros(3, 2, 4, 5, 5))
    >>> made.shape, unfolded(made, 3).shape
    (torch.Size([2, 12, 5, 5]), torch.Size([3, 2, 4, 5, 5]))
    """
    return raw.transpose(0, 1).flatten(1, 2)


def unfolded(raw: Tensor, num: int) -> Tensor:
    """Return [N, B·C, …] as [B, N, C, …], without a copy."""
    return raw.unflatten(1, (num, -1)).transpose(0, 1)


def _convolution(func: Any, dims: int, transposed: bool) -> Callable[..., Any]:
    names = (
        ("stride", "padding", "output_padding", "groups", "dilation")
        if transposed
        else ("stride", "padding", "dilation", "groups")
    )

    def run(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        if input.dim() == dims + 1:
            return run(input.unsqueeze(0), weight, bias, **given).squeeze(0)
        num, groups = num_models(input, weight, bias), given.pop("groups", 1)
        filters = raw_of(weight, num).flatten(0, 1)
        flat_bias = None if bias is None else raw_of(bias, num).reshape(-1)
        if type(input) is not Fused and groups == 1 and not transposed:  # what all models see: one dense convolution
            return Fused(unfolded(func(input, filters, flat_bias, **given), num))
        channels = folded(raw_of(input, num))
        return Fused(unfolded(func(channels, filters, flat_bias, groups=num * groups, **given), num))

    return run


for _dims, _plain, _back in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    rules[_plain] = _convolution(_plain, _dims, transposed=False)
    rules[_back] = _convolution(_back, _dims, transposed=True)
    for _name in (f"conv{_dims}d", f"conv_transpose{_dims}d"):
        rules[getattr(torch, _name)] = rules[getattr(F, _name)]


@rule("embedding")
def _embedding(
    input: Any, weight: Any, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    if type(weight) is not Fused or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    num, num_rows, width = weight.raw.shape
    places = raw_of(input, num)
    offsets = torch.arange(num, device=places.device).view(num, *(1,) * input.dim()) * num_rows
    found = F.embedding(places + offsets, weight.raw.reshape(num * num_rows, width))
    if padding_idx is not None:  # the row has no gradient, in any model
        padding = (places == padding_idx % num_rows).unsqueeze(-1)
        found = torch.where(padding, found.detach(), found)
    return Fused(found)


@rule("scaled_dot_product_attention")
def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    num = num_models(query, key, value, attn_mask)
    if dropout_p:
        return _attention_by_products(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not query.dim() == key.dim() == value.dim() or query.dim() < 3:
        return NotImplemented
    q, k, v = (raw_of(each, num).flatten(0, 1) for each in (query, key, value))
    mask = None if attn_mask is None else _mask(attn_mask, num, query)
    found = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return Fused(found.unflatten(0, (num, -1)))


def _mask(mask: Any, num: int, query: Any) -> Tensor:
    """Return the mask with B and the batch as one dim, where it has a batch at all."""
    if type(mask) is not Fused and (mask.dim() < query.dim() or mask.shape[0] == 1):
        return mask
    lead = (1,) * (query.dim() - mask.dim())
    raw = raw_of(mask, num).reshape(num, *lead, *mask.shape)
    return raw.expand(num, query.shape[0], *raw.shape[2:]).flatten(0, 1)


def _attention_by_products(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool
) -> Any:  # fmt: skip
    """Attention whose weights are dropped, in the ops that a CPU takes for one model."""
    if gqa and query.shape[-3] != key.shape[-3]:
        return NotImplemented
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    elif mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return F.dropout(torch.softmax(scores, dim=-1), dropout_p, True) @ value


@rule("dropout")
def _dropout(input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _dropped(input, p, training, lambda raw: raw)


@rule("dropout1d", "dropout2d", "dropout3d", "feature_dropout")
def _feature_dropout(input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if input.dim() < 3:
        return NotImplemented
    return _dropped(input, p, training, lambda raw: raw[:, :, :, *(slice(1),) * (raw.dim() - 3)])


def _dropped(input: Any, p: Any, training: bool, of: Callable[[Tensor], Tensor]) -> Any:
    """p: a share for all models, or one for each (`model.PerModel`)."""
    if not training or p == 0.0:
        return input
    shares = [1 - each for each in p] if isinstance(p, tuple) else 1 - p
    raw = input.raw if type(input) is Fused else input.expand(len(current().seeds), *input.shape)
    noise = current().kept(of(raw), shares)
    scale = torch.as_tensor(shares, dtype=raw.dtype, device=raw.device).reshape(-1, *(1,) * (raw.dim() - 1))
    return Fused(raw * (noise / scale.where(scale > 0, 1.0)))
