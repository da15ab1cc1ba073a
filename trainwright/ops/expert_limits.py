"""Rows of experts beyond those that were planned: computed in pieces that fit, or the lightest of them dropped.

    level        rows of several runs within a capacity   the fullest runs are cut to a common length
    heaviest     which rows a shorter run keeps           those of the largest routing weights
    num_pieces   into how many parts a call is cut        no rank sends or computes more than its capacity in any of them
    cut          the rows of one part                     an even share of every run

All ranks of a group know all lengths, so that each finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor


class Limit(StrEnum):
    """What becomes of rows beyond those that were planned."""

    NONE = "none"
    """They are computed like all others."""
    PIECES = "pieces"
    """All rows are computed in pieces, and nothing of them but their order is kept for the backward."""
    DROP = "drop"
    """They are left out: their expert adds nothing to their token."""


def level(counts: Tensor, capacity: int) -> Tensor:
    """Return how many rows each run keeps: the fullest are cut to a common length, until all together fit.

    counts: [runs]. The rows that a common length leaves over go to the first of the runs that were cut.

    >>> level(torch.tensor([5, 1, 9, 4]), 12)
    tensor([4, 1, 4, 3])
    """
    ordered = counts.sort().values
    longer = torch.arange(counts.shape[0], 0, -1, device=counts.device)
    below = ordered.cumsum(0) - ordered
    fits = below + ordered * longer <= capacity
    num = int(fits.sum())
    if num == counts.shape[0]:
        return counts
    common, rest = divmod(capacity - int(below[num]), counts.shape[0] - num)
    is_cut = counts > common
    return counts.clamp(max=common) + (is_cut & (is_cut.cumsum(0) <= rest)).to(counts.dtype)


def heaviest(weights: Tensor, key: Tensor, kept: Tensor) -> Tensor:
    """Return the places of the rows that stay, ordered by run, and within a run by weight.

    weights: [rows]. key: [rows], each one's run; those that have none come behind all. kept: [runs], how many stay of each.
    """
    by_weight = weights.argsort(descending=True, stable=True)
    order = by_weight[key[by_weight].argsort(stable=True)]
    runs = key[order]
    starts = torch.searchsorted(runs, torch.arange(kept.shape[0] + 1, device=key.device))
    place = torch.arange(order.shape[0], device=key.device) - starts[runs]
    return order[place < torch.cat([kept, kept.new_zeros(1)])[runs]]


def num_pieces(lengths: Sequence[Sequence[int]], may_send: Sequence[int], may_compute: Sequence[int]) -> int:
    """Return into how many pieces the rows are cut so that each rank sends and computes at most what it may, in each.

    lengths: [sender][receiver]. Where a piece of one row a run is too much already, that is what a piece has.

    >>> num_pieces([[10, 4], [8, 0]], may_send=[14, 14], may_compute=[9, 9])
    2
    """

    def fits(pieces: int) -> bool:
        parts = [[math.ceil(length / pieces) for length in row] for row in lengths]
        sent, computed = map(sum, parts), map(sum, zip(*parts))
        return all(a <= b for a, b in zip((*sent, *computed), (*may_send, *may_compute)))

    most = max(max(row) for row in lengths)
    return next((pieces for pieces in range(1, most) if fits(pieces)), max(1, most))


def cut(lengths: Sequence[int], num: int, piece: int) -> list[tuple[int, int]]:
    """Return where `piece` of `num` lies in each of consecutive runs: start and stop among all rows.

    >>> cut([5, 2], 2, 0), cut([5, 2], 2, 1)
    ([(0, 2), (5, 6)], [(2, 5), (6, 7)])
    """
    found, first = [], 0
    for length in lengths:
        found.append((first + length * piece // num, first + length * (piece + 1) // num))
        first += length
    return found
