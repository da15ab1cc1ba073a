"""Computes sums in a fixed order, so that they are equal bit for bit on every engine and for any number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 1024


def ordered_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Return parts[0] + parts[1] + …, summed in that order.

    >>> ordered_sum([torch.tensor([1e16]), torch.tensor([1.0]), torch.tensor([-1e16])])
    tensor([0.])
    """
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def squared_norm(x: Tensor) -> Tensor:
    """Return Σ x², summed by rows of 1024, so that threads divide rows among themselves, not one sum.

    >>> squared_norm(torch.tensor([3.0, 4.0]))
    tensor(25.)
    """
    rows = x.numel() // _ROW * _ROW
    flat = x.reshape(-1)
    parts = flat[:rows].view(-1, _ROW).square().sum(1)
    tail = flat[rows:].square().sum()
    return (_row_sum(parts) if parts.numel() else parts.new_zeros(())) + tail


def _row_sum(values: Tensor) -> Tensor:
    while values.numel() > _ROW:
        pad = -values.numel() % _ROW
        values = torch.nn.functional.pad(values, (0, pad)).view(-1, _ROW).sum(1)
    return values.sum()
