"""What the charts share. A chart is a plain plotly figure; the page sets the colours and fonts of its theme."""

from __future__ import annotations

from typing import Any

Figure = dict[str, Any]
"""`data` and `layout`, as plotly.js takes them, and for some charts `menus` of what else they can show."""

COLORS = {
    "param": "#4477aa",
    "optimizer": "#8866aa",
    "grad": "#dd9944",
    "saved": "#33997f",
    "other": "#99a3ad",
}
"""By category of memory, in the order in which they are stacked."""
BUDGET, MEASURED, INFEASIBLE = "#bb3344", "#33997f", "#99a3ad"
TEXT_ROOM = 1.35
"""How much longer than its longest bar an axis is, so that the number behind the bar has room."""
_KIB = 1024


def time_unit_of(longest_s: float) -> tuple[float, str]:
    """The unit in which `longest_s` seconds read best.

    >>> time_unit_of(0.04), time_unit_of(2.0)
    ((0.001, 'ms'), (1.0, 's'))
    """
    return (1.0, "s") if longest_s >= 1 else (1e-3, "ms") if longest_s >= 1e-3 else (1e-6, "µs")


def unit_of(largest: float) -> tuple[float, str]:
    """The unit in which `largest` bytes read best."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= _KIB**power:
            return float(_KIB**power), unit
    return 1.0, "B"
