"""Tests of settings that several files of this folder share, for `check_range`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any


def whole(least: int = 1) -> Callable[[Any], bool]:
    """Return a test for whole numbers of at least `least`.

    >>> whole()(3), whole()(0)
    (True, False)
    """
    return lambda value: operator.index(value) >= least


def positive(value: Any) -> bool:
    """Return whether a number is above 0 and finite.

    >>> positive(0.5), positive(math.inf)
    (True, False)
    """
    return 0 < value < math.inf


def in_unit(value: Any) -> bool:
    """Return whether a number is in (0, 1].

    >>> in_unit(1.0), in_unit(0.0)
    (True, False)
    """
    return 0 < value <= 1
