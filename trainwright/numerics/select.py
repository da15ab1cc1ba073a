"""The k-th largest magnitude among many tensors, exactly, without bringing them together.

Magnitudes order as the integers that their bits spell, so the answer's bits are found 8 at a time: count, over all
tensors, how often each next digit occurs behind the digits already known, and take the digit that the k-th falls in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_DIGIT_BITS = 8
_NUM_DIGITS = 1 << _DIGIT_BITS
_CHUNK = 1 << 18
"""Elements counted at a time: counting takes some 20 bytes for each."""


def kth_largest_magnitude(
    tensors: Sequence[Tensor], index: int, add: Callable[[Iterable[Tensor]], Tensor] | None = None
) -> Tensor:
    """Return the magnitude at place `index`, from 0, of all elements in descending order, a tensor without dimensions.

    tensors: real, of floating dtypes; fp64 is selected in fp64, everything else in fp32 (exact for bf16 and fp16). NaN
        counts as larger than infinity. Each pass holds at most some 6 MB beside them, and there are four (eight in
        fp64).
    index: below the number of elements, over all ranks.
    add: sums the counts of each tensor, [256] each, over tensors and ranks; `None`: over these tensors alone.

    Raises `ValueError` for no tensors and a negative index.

    >>> kth_largest_magnitude([torch.tensor([1.0, -5.0]), torch.tensor([[3.0]])], 1)
    tensor(3.)
    """
    if not tensors or index < 0:
        raise ValueError(f"kth_largest_magnitude needs tensors and an index from 0; got {len(tensors)} and {index}")
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    device = tensors[0].device
    known = torch.zeros(1, dtype=torch.int64, device=device)
    left = torch.full((1,), float(index), dtype=torch.float64, device=device)
    for shift in range(torch.finfo(wide).bits - _DIGIT_BITS, -1, -_DIGIT_BITS):
        found = (_digit_counts(tensor, wide, known, shift) for tensor in tensors)
        counts = _sum(found, device) if add is None else add(found)
        larger = torch.cat([counts.new_zeros(1), counts.flip(0).cumsum(0)])  # [d]: those with a digit above max - d
        place = torch.searchsorted(larger, left, right=True) - 1
        left = left - larger.gather(0, place)
        known = (known << _DIGIT_BITS) | (_NUM_DIGITS - 1 - place)
    return known.to(torch.int32 if wide == torch.float32 else torch.int64).view(wide).squeeze(0)


def selection_bytes(num_elements: int) -> int:
    """Return about the most bytes that the selection holds at once, for a tensor of so many elements.

    >>> selection_bytes(10**9) < 2**24
    True
    """
    return 21 * min(num_elements, _CHUNK) + 3 * 8 * _NUM_DIGITS


def _digit_counts(tensor: Tensor, wide: torch.dtype, known: Tensor, shift: int) -> Tensor:
    """Count the digits at `shift` of the magnitudes whose higher digits are `known`; [256], float64."""
    counts = torch.zeros(_NUM_DIGITS, dtype=torch.float64, device=tensor.device)
    for chunk in tensor.reshape(-1).split(_CHUNK):
        bits = chunk.abs().to(wide).view(torch.int32 if wide == torch.float32 else torch.int64)
        digits = (bits >> shift) & (_NUM_DIGITS - 1)
        if shift + _DIGIT_BITS < torch.finfo(wide).bits:
            digits = torch.where((bits >> (shift + _DIGIT_BITS)) == known, digits, -1)
        # Bins of width 1 about the digits; what is outside, -1, is not counted.
        counts += torch.histc(digits.double(), bins=_NUM_DIGITS, min=-0.5, max=_NUM_DIGITS - 0.5)
    return counts


def _sum(counts: Iterable[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros(_NUM_DIGITS, dtype=torch.float64, device=device)
    for found in counts:
        total += found.to(device)
    return total
