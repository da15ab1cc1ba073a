"""Writes many names, or many numbers, as one text: `transformer.h.{0-11}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def span(names: Sequence[str]) -> str:
    """Write names that differ in one number as one.

    >>> span(["h.0.attn", "h.1.attn", "h.2.attn", "h.5.attn"])
    'h.{0-2,5}.attn'
    """
    if len(names) == 1:
        return names[0]
    rows = [re.split(r"(\d+)", name) for name in names]
    differing = (
        [k for k in range(len(rows[0])) if len({row[k] for row in rows}) > 1]
        if len({len(r) for r in rows}) == 1
        else []
    )
    if len(differing) == 1 and rows[0][differing[0]].isdigit():
        at = differing[0]
        return "".join(rows[0][:at]) + "{" + ranges(int(row[at]) for row in rows) + "}" + "".join(rows[0][at + 1 :])
    head = _common_prefix(names)
    tail = _common_prefix([name[len(head) :][::-1] for name in names])[::-1]
    middles = [name[len(head) : len(name) - len(tail)] for name in names]
    return f"{head}{{{','.join(middles)}}}{tail}"


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as runs.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    count = next((k for k, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:count]
