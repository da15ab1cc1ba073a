"""What the battery of optimizer tests needs to know of each optimizer of ours: one `Case` a record, one file a family."""

from __future__ import annotations

from . import eight_bit, elementwise, scaled, second_order
from .case import Case, Problem

__all__ = ["CASES", "Case", "Problem"]

CASES: dict[str, Case] = {
    case.name: case for case in (*eight_bit.CASES, *elementwise.CASES, *scaled.CASES, *second_order.CASES)
}
