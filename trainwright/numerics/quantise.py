r"""Block-wise quantisation to 8 bits: a code a value, and the largest magnitude of every block.

the codes' values        `Codebook`, `dynamic_codebook`
x → code, max|x|         `quantise`
code, max|x| → x         `dequantise`
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_NUM_CODES = 256
_NUM_DECADES = 7
_SMALLEST_SCALE = 1e-38
_CELL_BITS = 16
"""Nearest codes are looked up by a number's sign, exponent and first seven bits of its fraction."""


class Codebook:
    """256 values in [-1, 1], ascending, and a table that finds the nearest one without a search.

    values: [256], of which one is 0. `to(device)` gives the same tables elsewhere. Raises `ValueError` for other values,
    and where two of them are so near that a number's first 16 bits cannot tell them apart.
    """

    def __init__(self, values: Tensor) -> None:
        wide = values.double()
        if wide.shape != (_NUM_CODES,) or bool((wide.diff() <= 0).any()) or float(wide.abs().max()) > 1:
            raise ValueError(
                f"a code book needs {_NUM_CODES} ascending values in [-1, 1]; got shape {tuple(values.shape)} from "
                f"{float(wide.min()):g} to {float(wide.max()):g}; scale or sort them"
            )
        self.values = wide.float()
        self.zero = int((wide == 0).nonzero()[0]) if bool((wide == 0).any()) else -1
        held = self.values.double()  # what a code stands for, which is what has to be near
        self._first, self._boundary = _cells((held[1:] + held[:-1]) / 2)

    def to(self, device: torch.device) -> Codebook:
        """Return the code book with its tables on `device`."""
        moved = object.__new__(Codebook)
        moved.zero = self.zero
        moved.values = self.values.to(device)
        moved._first, moved._boundary = self._first.to(device), self._boundary.to(device)
        return moved

    def nearest(self, x: Tensor) -> Tensor:
        """Return the codes (uint8) of the values nearest to `x` (fp32 in [-1, 1]).

        >>> dynamic_codebook(signed=True).nearest(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([  0, 127, 255], dtype=torch.uint8)
        """
        flat = x.reshape(-1)
        cell = (flat.view(torch.int32) >> _CELL_BITS).add_(1 << (_CELL_BITS - 1))
        codes = self._first.index_select(0, cell)
        return codes.add_(flat > self._boundary.index_select(0, cell)).to(torch.uint8).view(x.shape)


def dynamic_codebook(signed: bool, device: torch.device | str = "cpu") -> Codebook:
    """Return the dynamic map: seven decades, each of twice as many values as the one below; the same object every time.

    Decade i = 0 … 6 covers 10^(i-7) to 10^(i-6) by the midpoints of 2^i equal intervals, 2^(i+1) without signs; 0 and
    1 (but not -1) are added. Relative error is small over seven orders of magnitude, where equal steps have two.

    >>> book = dynamic_codebook(signed=False)
    >>> book.values[[0, 1, 254, 255]]
    tensor([0.0000e+00, 3.2500e-07, 9.9648e-01, 1.0000e+00])

    Source: Dettmers 2016, arXiv:1511.04561; the form of Dettmers et al. 2022, arXiv:2110.02861.
    """
    return _dynamic_codebook(signed, torch.device(device))


def quantise(x: Tensor, codebook: Codebook, block_size: int = 256, keep_sign: bool = False) -> tuple[Tensor, Tensor]:
    """Return a code for each element and the largest magnitude of each block of consecutive elements.

    x: fp32 with any shape; the last block may be short. codebook: on the device of `x`. block_size: elements a block.
    keep_sign: negative values that are nearest to 0 get the code below it.

    Returns codes (uint8, shape of `x`) and scales (fp32, [⌈numel / block_size⌉]). A block with NaN or an infinity
    becomes NaN as a whole.

    >>> codes, scales = quantise(torch.tensor([0.0, -2.0, 4.0]), dynamic_codebook(signed=True))
    >>> codes, scales
    (tensor([127,  35, 255], dtype=torch.uint8), tensor([4.]))
    """
    if not x.numel():
        return torch.empty_like(x, dtype=torch.uint8), x.new_empty(0)
    flat = x.reshape(-1)
    rows = flat.numel() // block_size * block_size
    parts = [flat[:rows].view(-1, block_size), flat[rows:].view(1, -1)]
    parts = [part for part in parts if part.numel()]
    scales = [part.abs().amax(1) for part in parts]
    scaled = [part * scale.clamp_min(_SMALLEST_SCALE).reciprocal()[:, None] for part, scale in zip(parts, scales)]
    codes = [codebook.nearest(part) for part in scaled]
    if keep_sign:
        codes = [code - ((part < 0) & (code == codebook.zero)).to(torch.uint8) for code, part in zip(codes, scaled)]
    return torch.cat([code.view(-1) for code in codes]).view(x.shape), torch.cat(scales)


def dequantise(codes: Tensor, scales: Tensor, codebook: Codebook, block_size: int = 256) -> Tensor:
    """Return the values (fp32, shape of `codes`) that codes and the scales of their blocks stand for.

    >>> book = dynamic_codebook(signed=True)
    >>> dequantise(*quantise(torch.tensor([0.0, -2.0, 4.0]), book), book)
    tensor([ 0.0000, -2.0031,  4.0000])
    """
    values = codebook.values.index_select(0, codes.reshape(-1).to(torch.int32))
    rows = values.numel() // block_size
    values[: rows * block_size].view(-1, block_size).mul_(scales[:rows, None])
    values[rows * block_size :].mul_(scales[rows:])
    return values.view(codes.shape)


def num_blocks(num_elements: int, block_size: int) -> int:
    """Return how many blocks that many elements make, the last one short."""
    return -(-num_elements // block_size)


@functools.cache
def _dynamic_codebook(signed: bool, device: torch.device) -> Codebook:
    if device.type != "cpu":
        return _dynamic_codebook(signed, torch.device("cpu")).to(device)
    magnitudes = torch.cat([_decade(i, 2 ** (i + (not signed))) for i in range(_NUM_DECADES)])
    values = torch.cat([-magnitudes, magnitudes] if signed else [magnitudes])
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return Codebook(torch.cat([values, ends]).sort().values)


def _decade(index: int, num_intervals: int) -> Tensor:
    ends = torch.linspace(0.1, 1.0, num_intervals + 1, dtype=torch.float64)
    return (ends[1:] + ends[:-1]) / 2 * 10.0 ** (index - _NUM_DECADES + 1)


def _cells(boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for all numbers with the same first 16 bits, the code of the least and the boundary among them.

    Cells are in the order of those bits taken as a signed integer, from the most negative.
    """
    prefixes = torch.arange(-(1 << (_CELL_BITS - 1)), 1 << (_CELL_BITS - 1), dtype=torch.int32) << _CELL_BITS
    ends = torch.stack([prefixes, prefixes | ((1 << _CELL_BITS) - 1)]).view(torch.float32).double()
    ends = torch.where(ends.isnan(), math.inf * ends.new_tensor(1.0).copysign(prefixes), ends)
    low, high = ends.amin(0), ends.amax(0)
    rounded = boundaries.float()
    # rounded up, an edge would let a number just above the boundary stay below it
    edges = torch.where(rounded > boundaries, rounded.nextafter(rounded.new_tensor(-math.inf)), rounded).double()
    first, last = torch.bucketize(low, edges), torch.bucketize(high, edges)
    if bool((last - first > 1).any()):
        raise ValueError("a code book needs values that 16 bits tell apart; two are nearer; spread them")
    padded = torch.cat([edges, edges.new_tensor([math.inf])])
    boundary = torch.where(last > first, padded[first], torch.full_like(low, math.inf))
    return first.to(torch.int32), boundary.float()
