"""The k-th largest magnitude among many tensors, exactly, without bringing them together.

Magnitudes order as the integers that their bits spell, so the answer's bits are found 8 at a time: count, over all
tensors, how often each next digit occurs behind the digits already known, and take the digit that the k-th falls in.

Much faster, where all elements are this process's and in its memory: a sample tells between which two magnitudes the
k-th very likely is; one compiled pass counts what is above them and keeps what is between, and so on with what was kept.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .native import library

_DIGIT_BITS = 8
_NUM_DIGITS = 1 << _DIGIT_BITS
_CHUNK = 1 << 18
"""Elements counted at a time: counting takes some 20 bytes for each."""
_LEAST_SAMPLED = 1 << 18
_LEAST_ELEMENTS = 1 << 15
"""Of a thread."""
_NUM_SAMPLED = 1 << 14
_NUM_DEVIATIONS = 4
"""Half a range's width: the k-th is outside once in some 16 000 times, and then found digit by digit."""


def kth_largest_magnitude(
    tensors: Sequence[Tensor], index: int, add: Callable[[Iterable[Tensor]], Tensor] | None = None
) -> Tensor:
    """Return the magnitude at place `index`, from 0, of all elements in descending order, a tensor without dimensions.

    tensors: real, of floating dtypes; fp64 is selected in fp64, everything else in fp32 (exact for bf16 and fp16). NaN
        counts as larger than infinity. For the memory see `selection_bytes`; there are four passes (eight in fp64),
        by sampling one.
    index: below the number of elements, over all ranks.
    add: sums the counts of each tensor, [256] each, over tensors and ranks; `None`: over these tensors alone, and
        from 2^18 elements in a CPU's memory by sampling, with a compiled pass, where there is a compiler.

    Raises `ValueError` for no tensors and a negative index.

    >>> kth_largest_magnitude([torch.tensor([1.0, -5.0]), torch.tensor([[3.0]])], 1)
    tensor(3.)
    """
    if not tensors or index < 0:
        raise ValueError(f"kth_largest_magnitude needs tensors and an index from 0; got {len(tensors)} and {index}")
    if add is None and (near := _by_samples(tensors, index)) is not None:
        return near
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


def _by_samples(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    """Return the magnitude, or `None` where it cannot be found so."""
    own = all(type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" for tensor in tensors)
    num_elements = sum(tensor.numel() for tensor in tensors)
    narrow = all(tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors)
    if not own or not narrow or not index < num_elements or num_elements < _LEAST_SAMPLED or _keep_between() is None:
        return None
    flat = [tensor.detach().reshape(-1).contiguous() for tensor in tensors]  # the pass reads on from the first element
    while num_elements > 2 * _NUM_SAMPLED:
        low, high = _likely_range(flat, index, num_elements)
        num_above, kept = _between(flat, low, high)
        if not num_above <= index < num_above + kept.numel() or (kept.numel() > num_elements // 2 and low < high):
            return None
        if low == high:
            return torch.tensor(low)
        flat, index, num_elements = [kept], index - num_above, kept.numel()
    return _descending(flat)[index]


def _descending(flat: list[Tensor]) -> Tensor:
    """Return all magnitudes, NaN first."""
    return torch.cat([part.float() for part in flat]).abs().sort(descending=True).values


def _likely_range(flat: list[Tensor], index: int, num_elements: int) -> tuple[float, float]:
    """Return two magnitudes with the one at place `index` between them, by every so-manieth element."""
    step = num_elements // _NUM_SAMPLED
    sample = _descending([part[::step] for part in flat])
    share = (index + 0.5) / num_elements
    place, margin = share * len(sample), _NUM_DEVIATIONS * math.sqrt(len(sample) * share * (1 - share)) + 1
    first, last = math.floor(place - margin), math.ceil(place + margin)
    high = float(sample[first]) if first >= 0 else math.inf
    low = float(sample[last]) if last < len(sample) else 0.0
    return (0.0 if math.isnan(low) else low), (math.inf if math.isnan(high) else high)


def _between(flat: list[Tensor], low: float, high: float) -> tuple[int, Tensor]:
    """Count what is above `high`, and return what is not, down to `low`."""
    scan, count, num_above, kept = _keep_between(), ctypes.c_int64(), 0, []
    assert scan is not None
    room = torch.empty(min(_CHUNK, max(len(part) for part in flat)))
    for part in flat:
        for chunk in part.split(_CHUNK):
            narrow = chunk.dtype == torch.bfloat16
            values = chunk if narrow else chunk.float()
            num_threads = max(1, min(torch.get_num_threads(), len(values) // _LEAST_ELEMENTS))
            place, space = values.data_ptr(), room.data_ptr()
            num_kept = scan(num_threads, narrow, place, len(values), low, high, space, ctypes.byref(count))
            num_above += count.value
            kept.append(room[:num_kept].clone())
    return num_above, torch.cat(kept)


@functools.cache
def _keep_between() -> Callable[..., int] | None:
    """Return the compiled pass; `None` where there is no compiler."""
    try:
        function = library(Path(__file__).with_name("select.cpp")).keep_between
    except RuntimeError:
        return None
    pointer, size, bound = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    function.argtypes = [size, size, pointer, size, bound, bound, pointer, ctypes.POINTER(ctypes.c_int64)]
    function.restype = size
    return function


def selection_bytes(num_elements: int) -> int:
    """Return about the most bytes that the selection holds at once, for a tensor of so many elements.

    >>> selection_bytes(10**9) < 2**28
    True
    """
    by_digits = 21 * min(num_elements, _CHUNK)
    by_samples = 4 * _CHUNK + num_elements // 4  # a chunk's room, and twice the 3 % between the two magnitudes
    return max(by_digits, by_samples if num_elements >= _LEAST_SAMPLED else 0) + 4 * 8 * _NUM_DIGITS


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
