"""Normal numbers from a counter: the same on every machine, for a key alone, so that nobody has to send or keep them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

_TABLE_BITS, _GRID = 16, 1 << 16
_PER_COUNT = 16
"""Numbers that one count of the generator makes: four words of 64 bits."""


PIECE = 1 << 20
"""Numbers that long work draws at a time, so that it holds no more of them; see `pieces`."""


def pieces(num: int) -> Iterator[slice]:
    """Yield the slices of `num` numbers, `PIECE` at a time.

    >>> list(pieces(3)), len(list(pieces(PIECE + 1)))
    ([slice(0, 3, None)], 2)
    """
    return (slice(start, min(start + PIECE, num)) for start in range(0, num, PIECE))


def normals(num: int, key: tuple[int, ...], start: int = 0) -> Tensor:
    """Return `num` standard normal numbers (fp32) that depend on `key` alone, on every machine.

    start: how many come before them in the key's stream, a multiple of 16.

    Philox (Salmon et al. 2011) counts, 16 bits at a time choose one of 65536 quantiles, each a multiple of 2⁻¹⁶: no
    function whose last bit is a library's own. The largest is 4.3.

    >>> normals(3, (0, 1, 2, 3)).tolist() == normals(5, (0, 1, 2, 3)).tolist()[:3]
    True
    >>> normals(3, (0, 1), start=16).tolist() == normals(19, (0, 1)).tolist()[16:]
    True
    """
    drawn = torch.empty(num)
    np.take(_quantiles(), _sixteen_bits(num, key, start), out=drawn.numpy(), mode="clip")  # all are in range
    return drawn


def uniform_bits(num: int, key: tuple[int, ...], start: int = 0) -> Tensor:
    """Return `num` whole numbers from 0 to 65535 (int32) that depend on `key` alone.

    >>> bool((uniform_bits(1000, (1,)) < 65536).all())
    True
    """
    drawn = torch.empty(num, dtype=torch.int32)
    drawn.numpy()[:] = _sixteen_bits(num, key, start)
    return drawn


def _sixteen_bits(num: int, key: tuple[int, ...], start: int) -> np.ndarray:
    if start % _PER_COUNT:
        raise ValueError(f"a stream is entered at a multiple of {_PER_COUNT}; got {start}")
    hashed = hashlib.sha256(",".join(map(str, key)).encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(hashed[:16], "little"))
    generator.advance(start // _PER_COUNT)
    return generator.random_raw(-(-num // 4)).astype("<u8").view("<u2")[:num]


@cache
def _quantiles() -> np.ndarray:
    from scipy.special import ndtri  # every process that trains would take its time to import

    middles = (np.arange(1 << _TABLE_BITS) + 0.5) / (1 << _TABLE_BITS)
    values = np.round(ndtri(middles) * _GRID) / _GRID
    return values.astype(np.float32)
