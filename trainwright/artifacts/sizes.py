"""Sizes of memory, and large counts, as people write them."""

from __future__ import annotations

import math
import re

from .record import UserError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_EXAMPLES = "900000B, 512MiB, 24GB or 40GiB"


def parse_bytes(text: str | float) -> int:
    """Return the number of bytes that `text` states: a number and a unit, decimal (`24GB`) or binary (`40GiB`).

    Upper and lower case are the same, a number alone is bytes, and a fraction of a byte is dropped. Raises `UserError`
    for anything else, and for sizes that are not positive.

    >>> parse_bytes("512MiB"), parse_bytes("24GB"), parse_bytes("1.5 kib"), parse_bytes(9e5)
    (536870912, 24000000000, 1536, 900000)
    """
    if isinstance(text, float) and math.isfinite(text) and text >= 1:
        text = int(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", str(text))
    if not match:
        raise UserError(f"a size of memory is needed, such as {_EXAMPLES}; got {text!r}; write a number and a unit")
    number, unit = match.groups()
    if unit.upper() not in _UNITS:
        raise UserError(f"a unit of memory is needed, such as B, MB, MiB, GB or GiB; got {unit!r}; write {_EXAMPLES}")
    scale = _UNITS[unit.upper()]
    num_bytes = int(number) * scale if number.isdigit() else int(float(number) * scale)
    if num_bytes < 1:
        raise UserError(f"a size of at least one byte is needed; got {text!r}; write {_EXAMPLES}")
    return num_bytes


def parse_count(text: str | float) -> float:
    """Return the number that `text` states, with K, M, B (or G) or T for thousands, millions, billions and trillions.

    >>> parse_count("300B"), parse_count("1.5e6"), parse_count(12)
    (300000000000.0, 1500000.0, 12.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?|\.\d+)\s*([KkMmBbGgTt]?)\s*", str(text))
    found = float(match[1]) * _COUNTS[match[2].upper()] if match else math.nan
    if not (math.isfinite(found) and found > 0):
        raise UserError(f"a count above 0 is needed, such as 300B, 1.5e9 or 20000; got {text!r}; write one of these")
    return found
