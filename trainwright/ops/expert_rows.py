"""The arithmetic of a mixture's experts on one rank: which rows it computes, where they go, and the gradients of all.

    route      a token takes a row for each expert that it chose; rows are ordered by who holds the expert, then by expert
    exchange   where one axis splits tokens and experts alike, rows go to their expert's rank, and their results come back
    compute    gate(rows · w_in + b_in) · weight · w_out + b_out · weight, one grouped product each way
    combine    the sum of each token's rows

The weight is multiplied in between the products, so that its gradient needs nothing of the result: what is kept is the
order, the rows' input of the gate, and rows that came from elsewhere. The backward makes the gate's result anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .grouped import grouped_mm, grouped_outer
from .local import AxisGroup, Rows

Gate = Callable[[Tensor], Tensor]
Count = Callable[[Tensor, Rows], list[int]]
"""(numbers of rows, what was planned) → the numbers that count: read where there are values, else the planned ones."""


@dataclass(frozen=True)
class Holders:
    """Who computes which experts, as one rank sees it."""

    num_experts: int
    ranges: tuple[tuple[int, int], ...]
    """First expert and the one after the last, of each rank of the group that exchanges rows; of one rank alone, its own."""
    place: int = 0
    """This rank's in the group."""
    group: AxisGroup | None = None
    count: Count | None = None
    """None: this rank holds all experts, and knows how many rows there are."""
    imbalance: float = 1.0
    """By how much the fullest rank may have more rows than its even share, where they are planned."""

    @property
    def num_held(self) -> int:
        """The experts that the whole group holds."""
        return sum(stop - first for first, stop in self.ranges)

    @property
    def num_own(self) -> int:
        first, stop = self.ranges[self.place]
        return stop - first


def planned_rows(num_tokens: int, k: int, held: int, num_experts: int, imbalance: float) -> int:
    """Return the rows that are planned for `held` of `num_experts` experts: the even share times the imbalance, or the most.

    >>> planned_rows(100, 2, 1, 8, 1.25), planned_rows(100, 2, 1, 8, math.inf)
    (32, 100)
    """
    most = num_tokens * min(k, held)
    even = num_tokens * k * held / num_experts
    return min(most, math.ceil(even * imbalance)) if math.isfinite(imbalance) else most


@dataclass(frozen=True)
class _Routed:
    """Where the rows of one call go: tensors alone, beside the lengths of what is exchanged."""

    order: Tensor
    """[rows sent] The place of each row's choice among all tokens' choices, by holder and expert."""
    ends: Tensor
    """[own experts], int32: where the rows of each end, among those that are computed here."""
    expert: Tensor
    """[rows computed] The own expert of each."""
    local: Tensor | None
    """[rows computed] Where each came in what was received; None where nothing is exchanged."""
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


def run_experts(
    tokens: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
    gate: Gate, transposed: bool, holders: Holders,
) -> Tensor:  # fmt: skip
    """Return the rank's part of the mixture: whole where all experts are held here or exchanged, else a partial sum."""
    return _Experts.apply(tokens, ids, weights, w_in, w_out, b_in, b_out, gate, transposed, holders)


def _route(ids: Tensor, holders: Holders) -> _Routed:
    flat, held = ids.reshape(-1), holders.num_held
    key = flat if holders.count is None else _positions(flat, holders)
    order = torch.argsort(key, stable=True)
    by_holder = key[order]
    bounds = torch.searchsorted(by_holder, torch.arange(held + 1, device=ids.device))
    if holders.count is None:
        return _Routed(order, bounds[1:].to(torch.int32), by_holder, None)
    sent = planned_rows(ids.shape[0], ids.shape[1], held, holders.num_experts, holders.imbalance)
    if holders.group is None:
        (size,) = holders.count(bounds[-1:], Rows([sent], flat.shape[0] * held / holders.num_experts))
        return _Routed(order[:size].clone(), bounds[1:].to(torch.int32), by_holder[:size].clone(), None)
    return _route_among(order, bounds.diff(), sent if held < holders.num_experts else flat.shape[0], ids, holders)


def _positions(flat: Tensor, holders: Holders) -> Tensor:
    """Return for each choice the position of its expert in the order of holders; behind all, where nobody here holds it."""
    table = torch.full((holders.num_experts,), holders.num_held, dtype=flat.dtype, device=flat.device)
    position = 0
    for first, stop in holders.ranges:
        table[first:stop] = torch.arange(position, position + stop - first, device=flat.device)
        position += stop - first
    return table[flat]


def _route_among(order: Tensor, counts: Tensor, sent: int, ids: Tensor, holders: Holders) -> _Routed:
    """Let the ranks of the group know how many rows each sends, by expert: the only thing that the host has to see."""
    assert holders.group is not None
    assert holders.count is not None
    num, own = len(holders.ranges), holders.num_own
    sizes = [stop - first for first, stop in holders.ranges]
    padded = torch.stack([torch.nn.functional.pad(part, (0, max(sizes) - len(part))) for part in counts.split(sizes)])
    theirs = _exchanged(holders.group, padded, (1,) * num, (1,) * num)[:, :own]
    received = planned_rows(ids.shape[0] * num, ids.shape[1], own, holders.num_experts, holders.imbalance)
    rows = Rows(
        [sent, *[0] * (num - 1), received, *[0] * (num - 1)], ids.numel() * num * own / holders.num_experts, num
    )
    lengths = holders.count(torch.cat([padded.sum(1), theirs.sum(1)]), rows)
    send, receive = lengths[:num], lengths[num:]
    each = torch.arange(own, device=ids.device).repeat(num)
    expert = each.repeat_interleave(theirs.reshape(-1), output_size=sum(receive))
    local = torch.argsort(expert, stable=True)
    order = order if sum(send) == order.shape[0] else order[: sum(send)].clone()
    ends = theirs.sum(0).cumsum(0).to(torch.int32)
    return _Routed(order, ends, expert[local], local, tuple(send), tuple(receive))


class _Exchange(torch.autograd.Function):
    """Rows that go to the ranks of a group; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: AxisGroup, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        ctx.back = group, receive, send
        return _exchanged(group, rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None


def _exchanged(group: AxisGroup, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
    width = math.prod(rows.shape[1:])
    flat = group.all_to_all(rows.contiguous().view(-1), [n * width for n in send], [n * width for n in receive])
    return flat.view(sum(receive), *rows.shape[1:])


def _to_experts(rows: Tensor, routed: _Routed, holders: Holders) -> Tensor:
    """Bring rows in the order of sending to where they are computed, ordered by expert."""
    if routed.local is None:
        return rows
    assert holders.group is not None
    return _Exchange.apply(rows, holders.group, routed.send, routed.receive)[routed.local]


def _from_experts(rows: Tensor, routed: _Routed, holders: Holders) -> Tensor:
    """Bring them back."""
    if routed.local is None:
        return rows
    assert holders.group is not None
    return _Exchange.apply(rows[_inverse(routed.local)], holders.group, routed.receive, routed.send)


def _to_tokens(rows: Tensor, order: Tensor, num_tokens: int, k: int) -> Tensor:
    """Sum up each token's rows, in a fixed order where all are there."""
    if rows.shape[0] == num_tokens * k:
        return rows[_inverse(order)].view(num_tokens, k, rows.shape[1]).sum(1)
    return rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, order // k, rows)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return places


@dataclass(frozen=True)
class _Weights:
    """The parameters of the experts that are held here, as they are stored."""

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    transposed: bool

    @property
    def into(self) -> Tensor:
        """[e, hidden, parts · inner]"""
        return self.w_in if self.transposed else self.w_in.transpose(1, 2)

    @property
    def out_of(self) -> Tensor:
        """[e, inner, hidden]"""
        return self.w_out if self.transposed else self.w_out.transpose(1, 2)

    def gradient(self, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        """Return the gradient of the matrices that took rows `left` to rows of gradient `right`, as they are stored."""
        return grouped_outer(left, right, ends) if self.transposed else grouped_outer(right, left, ends)


def _compute(
    tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, routed: _Routed, holders: Holders
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result for each token, the rows that came here, and what went into the gate."""
    num_tokens, k = weights.shape
    rows = _to_experts(tokens[routed.order // k], routed, holders)
    scale = _to_experts(weights.reshape(-1)[routed.order], routed, holders).unsqueeze(1)
    up = grouped_mm(rows, own.into, routed.ends)
    if own.b_in is not None:
        up = _plus(up, own.b_in[routed.expert])
    out = grouped_mm(_times(gate(up), scale), own.out_of, routed.ends)
    if own.b_out is not None:
        out = _plus(out, _times(own.b_out[routed.expert], scale))
    return _to_tokens(_from_experts(out, routed, holders), routed.order, num_tokens, k), rows, up


def _plus(x: Tensor, y: Tensor) -> Tensor:
    """Add to a tensor of our own: in place where nobody differentiates."""
    return x + y if torch.is_grad_enabled() else x.add_(y)


def _times(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply a tensor of our own, whose type stays."""
    return (x * scale).to(x.dtype) if torch.is_grad_enabled() else x.mul_(scale)


class _Experts(torch.autograd.Function):
    """`_compute`, whose backward is given the order, the gate's input, and the rows that came from elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None,
        b_out: Tensor | None, gate: Gate, transposed: bool, holders: Holders,
    ) -> Tensor:  # fmt: skip
        routed = _route(ids, holders)
        own = _Weights(w_in, w_out, b_in, b_out, transposed)
        result, rows, up = _compute(tokens, weights, own, gate, routed, holders)
        received = None if routed.local is None else rows
        kept = routed.order, routed.ends, routed.expert, routed.local
        ctx.save_for_backward(tokens, weights, w_in, w_out, b_in, b_out, *kept, received, up)
        ctx.settings = gate, transposed, holders, routed.send, routed.receive
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, w_in, w_out, b_in, b_out, order, ends, expert, local, rows, up = ctx.saved_tensors
        gate, transposed, holders, send, receive = ctx.settings
        routed = _Routed(order, ends, expert, local, send, receive)
        own = _Weights(w_in, w_out, b_in, b_out, transposed)
        if torch.is_grad_enabled():
            found = _differentiable(tokens, weights, own, gate, routed, holders, grads[0])
        else:
            found = _gradients(ctx.needs_input_grad, tokens, weights, own, gate, routed, holders, rows, up, grads[0])
        return found[0], None, *found[1:], None, None, None


Gradients = tuple[Tensor | None, ...]
"""The gradients of tokens, weights, w_in, w_out, b_in, b_out."""


def _differentiable(tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, routed: _Routed, holders: Holders,
                    grad: Tensor) -> Gradients:  # fmt: skip
    """Return the gradients as functions of all that they depend on: they are differentiated again."""
    given = (tokens, weights, own.w_in, own.w_out, own.b_in, own.b_out)
    result, _, _ = _compute(tokens, weights, own, gate, routed, holders)
    wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in given)


def _gradients(
    needed: tuple[bool, ...], tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, routed: _Routed, holders: Holders,
    rows: Tensor | None, up: Tensor, grad: Tensor,
) -> Gradients:  # fmt: skip
    k, ends, expert = weights.shape[1], routed.ends, routed.expert
    place = routed.order // k
    g_out = _to_experts(grad[place], routed, holders)
    scale = _to_experts(weights.reshape(-1)[routed.order], routed, holders).unsqueeze(1)
    g_inner = grouped_mm(g_out, own.out_of.transpose(1, 2), ends)
    with torch.enable_grad():
        leaf = up.detach().requires_grad_()
        inner = gate(leaf)
    g_weights = None
    if needed[2]:
        g_scale = (g_inner * inner.detach()).sum(1)
        if own.b_out is not None:
            g_scale = g_scale + (g_out * own.b_out[expert]).sum(1)
        g_scale = _from_experts(g_scale.to(weights.dtype), routed, holders)
        g_weights = weights.new_zeros(weights.numel()).index_copy_(0, routed.order, g_scale).view(weights.shape)
        del g_scale
    scaled = inner.detach() * scale.to(inner.dtype) if needed[4] else None
    g_w_out = None if scaled is None else own.gradient(scaled, g_out, ends)
    del scaled
    g_b_out = _bias_gradient(own.b_out, expert, g_out, scale)
    del g_out
    (g_up,) = torch.autograd.grad(inner, leaf, g_inner.mul_(scale))
    del inner, leaf, g_inner
    g_b_in = _bias_gradient(own.b_in, expert, g_up, None)
    g_w_in = None
    if needed[3]:
        rows = tokens[place] if rows is None else rows
        g_w_in = own.gradient(rows, g_up, ends)
    del rows
    g_tokens = None
    if needed[0]:
        g_rows = grouped_mm(g_up, own.into.transpose(1, 2), ends)
        del g_up
        g_tokens = _to_tokens(_from_experts(g_rows, routed, holders), routed.order, weights.shape[0], k)
    return g_tokens, g_weights, g_w_in, g_w_out, g_b_in, g_b_out


def _bias_gradient(bias: Tensor | None, expert: Tensor, g_rows: Tensor, scale: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    own = g_rows if scale is None else (g_rows * scale).to(g_rows.dtype)
    return torch.zeros_like(bias).index_add_(0, expert, own)
