"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re

from .record import UserError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
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
