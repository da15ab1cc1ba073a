"""The arithmetic of a mixture's experts on one rank: which rows it computes, where they go, and the gradients of all.

    route      a token takes a row for each expert that it chose; rows are ordered by who holds the expert, then by expert
    exchange   where one axis splits tokens and experts alike, rows go to their expert's rank, and their results come back
    compute    gate(rows · w_in + b_in) · weight · w_out + b_out · weight, one grouped product each way
    combine    the sum of each token's rows

The weight is multiplied in between the products, so that its gradient needs nothing of the result: what is kept is the
order, the rows' input of the gate, and rows that came from elsewhere. The backward makes the gate's result anew.
Of a call that is computed in pieces the order alone is kept: its backward computes each piece anew, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .expert_routes import Holders, Routed, exchanged, route
from .grouped import grouped_mm, grouped_outer
from .local import AxisGroup

Gate = Callable[[Tensor], Tensor]


def run_experts(
    tokens: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
    gate: Gate, transposed: bool, holders: Holders,
) -> Tensor:  # fmt: skip
    """Return the rank's part of the mixture: whole where all experts are held here or exchanged, else a partial sum."""
    return _Experts.apply(tokens, ids, weights, w_in, w_out, b_in, b_out, gate, transposed, holders)


class _Exchange(torch.autograd.Function):
    """Rows that go to the ranks of a group; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: AxisGroup, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        ctx.back = group, receive, send
        return exchanged(group, rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None


def _to_experts(rows: Tensor, routed: Routed, holders: Holders) -> Tensor:
    """Bring rows in the order of sending to where they are computed, ordered by expert."""
    if routed.local is None:
        return rows
    assert holders.group is not None
    return _Exchange.apply(rows, holders.group, routed.send, routed.receive)[routed.local]


def _from_experts(rows: Tensor, routed: Routed, holders: Holders) -> Tensor:
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

    def rows_beside(self, tokens: Tensor, weights: Tensor) -> int:
        """Return as many rows as take the memory of all gradients, which a call in pieces adds up beside its rows."""
        operands = [tokens, weights, self.w_in, self.w_out, self.b_in, self.b_out]
        held = sum(tensor.numel() * tensor.element_size() for tensor in operands if tensor is not None)
        hidden, inner = self.out_of.shape[2], self.out_of.shape[1]
        row = (2 * hidden + self.into.shape[2] + inner) * self.w_in.element_size()
        return math.ceil(held / row)


def _compute(
    tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, routed: Routed, holders: Holders
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result for each token, the rows that came here, and what went into the gate."""
    num_tokens, k = weights.shape
    rows = _to_experts(tokens[routed.order // k], routed, holders)
    scale = _to_experts(weights.reshape(-1)[routed.order], routed, holders).unsqueeze(1)
    up = _into_gate(rows, own, routed)
    out = grouped_mm(_times(gate(up), scale), own.out_of, routed.ends)
    if own.b_out is not None:
        out = _plus(out, _times(own.b_out[routed.expert], scale))
    return _to_tokens(_from_experts(out, routed, holders), routed.order, num_tokens, k), rows, up


def _into_gate(rows: Tensor, own: _Weights, routed: Routed) -> Tensor:
    up = grouped_mm(rows, own.into, routed.ends)
    return up if own.b_in is None else _plus(up, own.b_in[routed.expert])


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
        own = _Weights(w_in, w_out, b_in, b_out, transposed)
        pieces = route(ids, weights, holders, own.rows_beside(tokens, weights))
        received = up = None
        if len(pieces) == 1:
            result, rows, up = _compute(tokens, weights, own, gate, pieces[0], holders)
            received = None if pieces[0].local is None else rows
        else:
            result = _sum_of_pieces(tokens, weights, own, gate, pieces, holders)
        kept = [tensor for piece in pieces for tensor in (piece.order, piece.ends, piece.expert, piece.local)]
        ctx.save_for_backward(tokens, weights, w_in, w_out, b_in, b_out, received, up, *kept)
        ctx.settings = gate, transposed, holders
        ctx.lengths = [(piece.send, piece.receive) for piece in pieces]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, w_in, w_out, b_in, b_out, rows, up, *kept = ctx.saved_tensors
        gate, transposed, holders = ctx.settings
        pieces = [Routed(*kept[4 * at : 4 * at + 4], *lengths) for at, lengths in enumerate(ctx.lengths)]
        own = _Weights(w_in, w_out, b_in, b_out, transposed)
        if torch.is_grad_enabled():
            found = _differentiable(tokens, weights, own, gate, pieces, holders, grads[0])
        elif len(pieces) == 1:
            found = _gradients(ctx.needs_input_grad, tokens, weights, own, gate, pieces[0], holders, rows, up, grads[0])
        else:
            found = _of_pieces(ctx.needs_input_grad, tokens, weights, own, gate, pieces, holders, grads[0])
        return found[0], None, *found[1:], None, None, None


Gradients = tuple[Tensor | None, ...]
"""The gradients of tokens, weights, w_in, w_out, b_in, b_out."""


def _sum_of_pieces(
    tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, pieces: Sequence[Routed], holders: Holders
) -> Tensor:
    total = tokens.new_zeros(tokens.shape)
    for piece in pieces:
        total = _plus(total, _compute(tokens, weights, own, gate, piece, holders)[0])
    return total


def _of_pieces(needed: tuple[bool, ...], tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, pieces: Sequence[Routed],
               holders: Holders, grad: Tensor) -> Gradients:  # fmt: skip
    """Return the gradients of a call in pieces, each of which is computed anew up to its gate."""
    totals: list[Tensor | None] = [None] * 6
    for piece in pieces:
        rows = _to_experts(tokens[piece.order // weights.shape[1]], piece, holders)
        up = _into_gate(rows, own, piece)
        found = _gradients(needed, tokens, weights, own, gate, piece, holders, rows, up, grad)
        totals = [part if total is None or part is None else total.add_(part) for total, part in zip(totals, found)]
        del rows, up, found
    return tuple(totals)


def _differentiable(tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, pieces: Sequence[Routed], holders: Holders,
                    grad: Tensor) -> Gradients:  # fmt: skip
    """Return the gradients as functions of all that they depend on: they are differentiated again."""
    given = (tokens, weights, own.w_in, own.w_out, own.b_in, own.b_out)
    result = _sum_of_pieces(tokens, weights, own, gate, pieces, holders)
    wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in given)


def _gradients(
    needed: tuple[bool, ...], tokens: Tensor, weights: Tensor, own: _Weights, gate: Gate, routed: Routed, holders: Holders,
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
