"""Bytes as people are told them."""

from __future__ import annotations

import math

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(num_bytes: float, up: bool = False) -> str:
    """Write bytes for people, to the nearest hundredth or, with `up`, to the next one.

    >>> size_text(1536 * 2**20), size_text(2**20), size_text(2**20 + 1, up=True)
    ('1.50 GiB', '1.00 MiB', '1.01 MiB')
    """
    for unit, size in _UNITS:
        if abs(num_bytes) >= size:
            shown = math.ceil(100 * num_bytes / size) / 100 if up else num_bytes / size
            return f"{shown:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def shown_bytes(num_bytes: int) -> int:
    """Return the bytes that are meant by `size_text(num_bytes, up=True)`: at least as many, and the same text.

    >>> shown_bytes(2**20 + 1) == int(1.01 * 2**20), size_text(shown_bytes(2**20 + 1), up=True)
    (True, '1.01 MiB')
    """
    for _, size in _UNITS:
        if num_bytes >= size:
            hundredths = math.ceil(100 * num_bytes / size)
            return max(num_bytes, int(hundredths * size / 100))
    return num_bytes
