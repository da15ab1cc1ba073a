"""Causal attention of one rank's rows of a sequence that several ranks share, each with all keys: as much work for every rank.

Row i sees the keys up to i, so the last of n ranks with consecutive rows would have (2 n - 1) times the work of the first. Each
keeps the first half of its rows and swaps the second with the rank that is as far from the end as it is from the start: rank r
computes blocks 2 r and 2 n - 1 - 2 r of 2 n, which see as many keys as those of any other. What comes out goes back.
A block takes the keys before it whole, its own under a square causal mask, and no others: no mask is ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_kernels import Attended, attend, attend_backward, has_kernel, merged
from .local import AxisGroup


@dataclass(frozen=True)
class Swap:
    """The halves that ranks swap, along one axis after the other."""

    groups: tuple[AxisGroup, ...]
    ranges: tuple[tuple[int, int], ...]
    """Start and stop of the own rows, then of those of the rank whose half has come after each exchange."""

    @cached_property
    def given(self) -> tuple[int, ...]:
        """The rows of each half that is held on the way."""
        return tuple((stop - start) // 2 for start, stop in self.ranges)

    @property
    def kept(self) -> int:
        """The rows that stay."""
        start, stop = self.ranges[0]
        return stop - start - self.given[0]

    @property
    def starts(self) -> tuple[int, int]:
        """The places in the sequence of the first row that stays, and of the first that comes."""
        return self.ranges[0][0], self.ranges[-1][1] - self.given[-1]

    def there(self, x: Tensor) -> Tensor:
        """Return the half that comes for the half `x` [..., rows, d] that goes."""
        for group, rows in zip(self.groups, self.given[1:]):
            x = _exchanged(group, x, rows)
        return x

    def back(self, x: Tensor) -> Tensor:
        """Return what became of the half that went, for what became of the half `x` that came."""
        for group, rows in zip(reversed(self.groups), reversed(self.given[:-1])):
            x = _exchanged(group, x, rows)
        return x


def _exchanged(group: AxisGroup, x: Tensor, rows: int) -> Tensor:
    shape = (*x.shape[:-2], rows, x.shape[-1])
    found: Tensor = group.opposite(x.reshape(-1), math.prod(shape))
    return found.view(shape)


def causal_rows(
    query: Tensor, key: Tensor, value: Tensor, *, swap: Swap, scale: float | None = None, enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the rank's rows of causal attention: query [b*, h, rows, d]; key, value [b*, h or its groups, all rows, d or e]."""
    del dropout_p  # 0: rows whose weights are dropped stay whole
    query, key, value = _autocast(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not has_kernel(query):
        return _by_mask(query, key, value, swap, scale, enable_gqa)
    lead, width = query.shape[:-3], value.shape[-1]
    size = _head_dim(query, value)
    padded = (F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in (query, key, value))
    samples = math.prod(lead)
    out: Tensor = _CausalRows.apply(*(x.reshape(samples, *x.shape[-3:]) for x in padded), swap, scale)
    return (out[..., :width] if width < size else out).reshape(*lead, *out.shape[1:-1], width)


def _head_dim(query: Tensor, value: Tensor) -> int:
    """The head dim that a kernel takes: one for all, on a GPU in whole multiples of 8."""
    largest = max(query.shape[-1], value.shape[-1])
    return largest if query.device.type == "cpu" else -(-largest // 8) * 8


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Attention is on autocast's list of ops in low precision."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors)


class _CausalRows(torch.autograd.Function):
    """Saved beside the operands and the result: what came, and what became of it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, swap: Swap, scale: float) -> Tensor:
        kept, (first, second) = swap.kept, swap.starts
        came = swap.there(query[:, :, kept:])
        batch, heads, rows, _ = query.shape
        # as the kernels leave it, positions before heads: what follows merges the heads by a view
        out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        own = _block(query[:, :, :kept], key, value, first, scale)
        out[:, :, :kept] = own.out
        other = _block(came, key, value, second, scale)
        out[:, :, kept:] = swap.back(other.out)
        ctx.swap, ctx.scale = swap, scale
        ctx.save_for_backward(query, key, value, out, own.lse, came, *other)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, came, other_out, other_lse = ctx.saved_tensors
        swap, scale, (grad,) = ctx.swap, ctx.scale, grads
        kept, (first, second) = swap.kept, swap.starts
        sums = torch.zeros_like(key), torch.zeros_like(value)
        of_query = torch.empty_like(query)
        own = Attended(out[:, :, :kept], lse)
        of_query[:, :, :kept] = _block_backward(
            grad[:, :, :kept], query[:, :, :kept], key, value, own, first, scale, sums
        )
        sent, other = swap.there(grad[:, :, kept:]), Attended(other_out, other_lse)
        of_query[:, :, kept:] = swap.back(_block_backward(sent, came, key, value, other, second, scale, sums))
        return of_query, *sums, None, None


def _pieces(start: int, rows: int) -> list[tuple[slice, bool]]:
    """The keys that a block of rows sees, each piece with whether it is under a causal mask."""
    before = [(slice(0, start), False)] if start else []
    return [*before, (slice(start, start + rows), True)]


def _block(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Attended:
    """Return what consecutive rows from `start` on take of the keys up to each."""
    rows = query.shape[2]
    if 0 in query.shape:
        return Attended(query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3]))
    found = [attend(query, key[:, :, keys], value[:, :, keys], causal, scale) for keys, causal in _pieces(start, rows)]
    return found[0] if len(found) == 1 else merged(*found)


def _block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, start: int, scale: float,
    sums: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """Return the gradient of the rows from `start` on, and add those of keys and values to `sums`."""
    total: Tensor | None = None
    for keys, causal in _pieces(start, query.shape[2]) if 0 not in query.shape else []:
        own = key[:, :, keys], value[:, :, keys]
        of_query, *others = attend_backward(grad, query, *own, whole, causal, scale)
        for into, other in zip(sums, others):
            into[:, :, keys].add_(other)  # `+=` would write it once more
        total = of_query if total is None else total.add_(of_query)
    return torch.empty_like(query) if total is None else total


def _by_mask(query: Tensor, key: Tensor, value: Tensor, swap: Swap, scale: float, enable_gqa: bool) -> Tensor:
    """The same by torch's own op and a mask, for values without such a kernel, and for gradients that are differentiated again."""
    kept = swap.kept
    came = _Swapped.apply(query[..., kept:, :], swap.there, swap.back)
    rows = torch.cat([query[..., :kept, :], came], -2)
    lengths = kept, came.shape[-2]
    places = torch.cat([torch.arange(start, start + n, device=query.device) for start, n in zip(swap.starts, lengths)])
    mask = places.unsqueeze(-1) >= torch.arange(key.shape[-2], device=query.device)
    if rows.shape[-2]:
        found = F.scaled_dot_product_attention(rows, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    else:  # such a rank meets the others all the same, in the backward too
        found = F.pad(rows, (0, value.shape[-1] - rows.shape[-1])) + 0 * (key.sum() + value.sum())
    own, other = found.split(lengths, -2)
    return torch.cat([own, _Swapped.apply(other, swap.back, swap.there)], -2)


class _Swapped(torch.autograd.Function):
    """A swap whose gradients are swapped back, as often as they are differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.ways = back, there
        moved: Tensor = there(x)
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Swapped.apply(grads[0], *ctx.ways), None, None
