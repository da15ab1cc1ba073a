"""Which rows a rank computes of a mixture's experts, and where they come from and go.

A token takes a row for each expert that it chose. Rows are ordered by who holds the expert, then by expert, then by token; where
one axis splits tokens and experts alike, its ranks tell each other how many rows they send, by expert: the only numbers that
the host has to see. Rows beyond what was planned are computed too, unless `expert_limits` is asked to keep to the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .expert_limits import Limit, cut, heaviest, level, num_pieces
from .local import AxisGroup, Rows

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
    limit: Callable[[], str] = lambda: Limit.NONE
    """What becomes of rows beyond those; the same on all ranks."""

    @property
    def num_held(self) -> int:
        """The experts that the whole group holds."""
        return sum(self.sizes)

    @property
    def num_own(self) -> int:
        return self.sizes[self.place]

    @property
    def sizes(self) -> list[int]:
        """The number of experts that each rank of the group holds."""
        return [stop - first for first, stop in self.ranges]


def planned_rows(num_tokens: int, k: int, held: int, num_experts: int, imbalance: float) -> int:
    """Return the rows that are planned for `held` of `num_experts` experts: the even share times the imbalance, or the most.

    >>> planned_rows(100, 2, 1, 8, 1.25), planned_rows(100, 2, 1, 8, math.inf)
    (32, 100)
    """
    most = num_tokens * min(k, held)
    even = num_tokens * k * held / num_experts
    return min(most, math.ceil(even * imbalance)) if math.isfinite(imbalance) else most


@dataclass(frozen=True)
class Routed:
    """Where the rows of one call go, or of one piece of it: tensors alone, beside the lengths of what is exchanged."""

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


def route(ids: Tensor, weights: Tensor, holders: Holders, margin: int) -> list[Routed]:
    """Find where the rows of a call go: in one piece, or in as many as it takes to keep to what was planned.

    ids: [tokens, k]. weights: [tokens, k], by which rows are chosen where some are dropped. margin: the rows that a piece has
    less than a call that is planned, for what it holds beside them.
    """
    if holders.count is None:
        return [_all_here(ids.reshape(-1), holders.num_experts)]
    call = _Call.of(ids, holders)
    if holders.limit() == Limit.NONE:
        return [call.at_once(call.lengths())]
    everyone = _Everyone.of(call, margin)
    call.note(everyone.counts)
    if holders.limit() == Limit.DROP:
        return [everyone.dropped(weights.reshape(-1))]
    return everyone.in_pieces()


def _all_here(flat: Tensor, num_experts: int) -> Routed:
    order = torch.argsort(flat, stable=True)
    by_expert = flat[order]
    bounds = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=flat.device))
    return Routed(order, bounds[1:].to(torch.int32), by_expert, None)


@dataclass(frozen=True)
class _Call:
    """The choices of this rank's tokens, ordered."""

    holders: Holders
    key: Tensor
    """[choices] The position of each one's expert in the order of holders; behind all, where nobody here holds it."""
    order: Tensor
    """[choices] Their places, by key."""
    counts: Tensor
    """[held experts] How many there are of each."""
    may_send: int
    may_compute: int
    even: tuple[float, float]
    """The rows that it sends and computes where every rank has as many as any other."""

    @classmethod
    def of(cls, ids: Tensor, holders: Holders) -> _Call:
        (num_tokens, k), num = ids.shape, len(holders.ranges)
        key = _positions(ids.reshape(-1), holders)
        order = torch.argsort(key, stable=True)
        counts = torch.searchsorted(key[order], torch.arange(holders.num_held + 1, device=ids.device)).diff()

        def planned(tokens: int, held: int) -> tuple[int, float]:
            whole = held == holders.num_experts
            most = planned_rows(tokens, k, held, holders.num_experts, holders.imbalance)
            return tokens * k if whole else most, tokens * k * held / holders.num_experts

        (may_send, sent), (may_compute, computed) = (
            planned(num_tokens, holders.num_held),
            planned(num_tokens * num, holders.num_own),
        )
        return cls(holders, key, order, counts, may_send, may_compute, (sent, computed))

    def by_holder(self, counts: Tensor) -> Tensor:
        """[held experts] → [ranks of the group, the most experts of any of them]"""
        sizes = self.holders.sizes
        return torch.stack([F.pad(part, (0, max(sizes) - len(part))) for part in counts.split(sizes)])

    def lengths(self) -> _Lengths:
        """Let the ranks of the group know how many rows each sends."""
        own, group = self.holders.num_own, self.holders.group
        if group is None:
            (size,) = self._counted(self.counts.sum().view(1))
            return _Lengths(self.counts.view(1, -1), [size], [size])
        num, sent = len(self.holders.ranges), self.by_holder(self.counts)
        theirs = exchanged(group, sent, (1,) * num, (1,) * num)[:, :own]
        found = self._counted(torch.cat([sent.sum(1), theirs.sum(1)]))
        return _Lengths(theirs, found[:num], found[num:])

    def note(self, everyone: Tensor) -> None:
        """Count the rows that are wanted, all ranks' numbers being known: [senders, holders, experts]."""
        place, lengths = self.holders.place, everyone.sum(2)
        alone = self.holders.group is None
        self._counted(lengths.view(1) if alone else torch.cat([lengths[place], lengths[:, place]]))

    def _counted(self, numbers: Tensor) -> list[int]:
        assert self.holders.count is not None
        num, (sent, computed) = len(self.holders.ranges), self.even
        if self.holders.group is None:
            return self.holders.count(numbers, Rows([self.may_compute], computed))
        planned = [self.may_send, *[0] * (num - 1), self.may_compute, *[0] * (num - 1)]
        return self.holders.count(numbers, Rows(planned, computed, num, sent))

    def at_once(self, lengths: _Lengths, order: Tensor | None = None) -> Routed:
        """Return the way of all rows together. order: of those that stay, where some do not."""
        order, size = self.order if order is None else order, sum(lengths.send)
        order = order if size == order.shape[0] else order[:size].clone()
        ends = lengths.theirs.sum(0).cumsum(0).to(torch.int32)
        if self.holders.group is None:
            return Routed(order, ends, self.key[order], None)
        expert = lengths.experts()
        local = torch.argsort(expert, stable=True)
        return Routed(order, ends, expert[local], local, tuple(lengths.send), tuple(lengths.receive))


class _Lengths(NamedTuple):
    """How many rows come and go."""

    theirs: Tensor
    """[senders, own experts]"""
    send: list[int]
    receive: list[int]

    def experts(self) -> Tensor:
        """Return the own expert of each row that comes, in the order in which they come."""
        num, own = self.theirs.shape
        each = torch.arange(own, device=self.theirs.device).repeat(num)
        return each.repeat_interleave(self.theirs.reshape(-1), output_size=sum(self.receive))


def _positions(flat: Tensor, holders: Holders) -> Tensor:
    """Return for each choice the position of its expert in the order of holders; behind all, where nobody here holds it."""
    table = torch.full((holders.num_experts,), holders.num_held, dtype=flat.dtype, device=flat.device)
    position = 0
    for first, stop in holders.ranges:
        table[first:stop] = torch.arange(position, position + stop - first, device=flat.device)
        position += stop - first
    return table[flat]


class _May(NamedTuple):
    """The most rows that a rank is to send and to compute, of a call that is planned and of one of its pieces."""

    send: int
    compute: int
    send_in_piece: int
    compute_in_piece: int


_LEAST_PART = 16
"""A piece has at least this part of the planned rows, whatever it holds beside them."""


@dataclass(frozen=True)
class _Everyone:
    """What all ranks of a group want to send, and may: on the host, the same on each."""

    call: _Call
    counts: Tensor
    """[senders, holders, experts of a holder]"""
    may: list[_May]

    @classmethod
    def of(cls, call: _Call, margin: int) -> _Everyone:
        """Exchange what is wanted."""
        own = [max(rows // _LEAST_PART, rows - margin, 1) for rows in (call.may_send, call.may_compute)]
        sent, group = call.by_holder(call.counts), call.holders.group
        may = sent.new_tensor([call.may_send, call.may_compute, *own])
        num, told = len(sent), torch.cat([sent.reshape(-1), may]).unsqueeze(0)
        every = told if group is None else exchanged(group, told.repeat(num, 1), (1,) * num, (1,) * num)
        every = every.cpu()
        return cls(
            call, every[:, : -len(may)].view(num, *sent.shape), [_May(*row) for row in every[:, -len(may) :].tolist()]
        )

    @property
    def place(self) -> int:
        return self.call.holders.place

    def dropped(self, weights: Tensor) -> Routed:
        """Return the way of the rows that fit."""
        kept = self.counts.clone()
        for sender, may in enumerate(self.may):
            kept[sender] = level(kept[sender].reshape(-1), may.send).view(kept[sender].shape)
        for holder, may in enumerate(self.may):
            kept[:, holder] = level(kept[:, holder].reshape(-1), may.compute).view(kept[:, holder].shape)
        order = None
        if not torch.equal(kept[self.place], self.counts[self.place]):
            own = torch.cat([row[:size] for row, size in zip(kept[self.place], self.call.holders.sizes)])
            order = heaviest(weights, self.call.key, own.to(weights.device))
        return self.call.at_once(self._lengths(kept), order)

    def _lengths(self, counts: Tensor) -> _Lengths:
        place, lengths = self.place, counts.sum(2)
        theirs = counts[:, place, : self.call.holders.num_own].to(self.call.key.device)
        return _Lengths(theirs, lengths[place].tolist(), lengths[:, place].tolist())

    def in_pieces(self) -> list[Routed]:
        """Return the ways of the pieces, in turn; of one alone, where no rank has more than was planned."""
        lengths = self.counts.sum(2).tolist()
        sent, computed = map(sum, lengths), map(sum, zip(*lengths))
        fits = all(a <= may.send and b <= may.compute for a, b, may in zip(sent, computed, self.may))
        found = self._lengths(self.counts)
        if fits:
            return [self.call.at_once(found)]
        num = num_pieces(lengths, [may.send_in_piece for may in self.may], [may.compute_in_piece for may in self.may])
        expert = found.experts()
        return [self._piece(found, expert, num, piece) for piece in range(num)]

    def _piece(self, lengths: _Lengths, expert: Tensor, num: int, piece: int) -> Routed:
        holders = self.call.holders
        sent, received = cut(lengths.send, num, piece), cut(lengths.receive, num, piece)
        order, own = _parts(self.call.order, sent), _parts(expert, received)
        local = None if holders.group is None else torch.argsort(own, stable=True)
        own = own if local is None else own[local]
        ends = torch.searchsorted(own, torch.arange(holders.num_own, device=own.device), right=True).to(torch.int32)
        send, receive = ((stop - first for first, stop in spans) for spans in (sent, received))
        return Routed(order, ends, own, local, tuple(send), tuple(receive))


def _parts(rows: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([rows[first:stop] for first, stop in spans])


def exchanged(group: AxisGroup, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
    """Send consecutive rows to the ranks of a group, so many to each; return those that come."""
    width = math.prod(rows.shape[1:])
    flat = group.all_to_all(rows.contiguous().view(-1), [n * width for n in send], [n * width for n in receive])
    return flat.view(sum(receive), *rows.shape[1:])
