"""Functions that captured programs call beside ATen's: each computes, and saves, what the original ops did."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear_io"]


def linear_io(x: Tensor, weight_io: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear map whose weight is stored input-first: `x @ weight_io + bias`.

    This is `view → addmm → view` as one op on an n-dimensional `x`, so that batch and sequence stay apart; values and
    what backward saves equal the original's. For a weight stored output-first use `torch.nn.functional.linear`.

    x: [..., in]; weight_io: [in, out]; bias: [out] or None. Returns [..., out].

    >>> linear_io(torch.ones(2, 3, 4), torch.ones(4, 5), torch.zeros(5)).shape
    torch.Size([2, 3, 5])
    """
    rows = x.reshape(-1, weight_io.size(0))
    out = torch.mm(rows, weight_io) if bias is None else torch.addmm(bias, rows, weight_io)
    return out.view(*x.shape[:-1], weight_io.size(1))
