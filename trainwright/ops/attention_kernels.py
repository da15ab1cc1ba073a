"""Fused attention of some rows with its log-sum-exp, and its backward given those of all keys: attention in pieces.

    out = Σ_p w_p · out_p,    w_p = exp(lse_p - lse),    lse = log Σ_p exp(lse_p)

for pieces p of the keys. Given `out` and `lse` of all keys, the backward of a piece is that of the kernel: it takes the weights of
the piece from `lse`, and what softmax subtracts from `out`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class Attended(NamedTuple):
    """What rows took of the keys: out [b, h, rows, e] and log-sum-exp [b, h, rows]."""

    out: Tensor
    lse: Tensor


def has_kernel(query: Tensor) -> bool:
    """Tell whether a fused kernel takes values like `query`, and may be used (`torch.nn.attention.sdpa_kernel`)."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    return query.device.type == "cpu" or (query.device.type == "cuda" and query.dtype in (*_HALVES, torch.float32))


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Attended:
    """Return what the rows of `query` [b, h, m, d] take of `key` and `value` [b, h or its groups, n, d].

    is_causal: row i sees the keys up to i; then m = n.
    """
    if query.device.type == "cpu":
        return Attended(
            *aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        )
    if query.dtype in _HALVES:
        return Attended(*aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[:2])
    key, value = (_for_heads(x, query) for x in (key, value))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )
    return Attended(out, lse[..., : query.shape[-2]])


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of one piece, given what the rows took of all keys."""
    out, lse = whole
    if query.device.type == "cpu":
        found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, is_causal, scale=scale
        )
        return found
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    if query.dtype in _HALVES:
        of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), None, None, query.shape[-2], key.shape[-2], 0.0, is_causal,
            unused, unused, scale=scale,
        )  # fmt: skip
        return of_query, of_key, of_value
    shared = key.shape[1]
    key, value = (_for_heads(x, query) for x in (key, value))
    of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, None, out, _padded(lse), unused, unused, 0.0, [True, True, True, False], is_causal,
        scale=scale,
    )  # fmt: skip
    return of_query, _of_groups(of_key, shared), _of_groups(of_value, shared)


def merged(first: Attended, second: Attended) -> Attended:
    """Return what rows took of both pieces of the keys; the operands are overwritten."""
    lse = torch.logaddexp(first.lse, second.lse)
    for part in (first, second):
        part.out.mul_(torch.exp(part.lse - lse).unsqueeze(-1))
    return Attended(first.out.add_(second.out), lse)


def _for_heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat the groups for the heads that share them, as the kernel for fp32 wants them."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _of_groups(grad: Tensor, groups: int) -> Tensor:
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)


def _padded(lse: Tensor) -> Tensor:
    """The kernel for fp32 reads rows in whole multiples of 32."""
    return torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
