"""Grids of which few cases are run on each change: `make test` runs these, `make test-all` every case."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Sequence[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, marked as slow where they are not among `fast`.

    A case is one value, or a tuple of them. Every one of `fast` has to be a case, so that none is left out by a slip of the pen.
    """
    assert all(case in cases for case in fast), f"{fast}: not all are among {cases}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else (pytest.mark.slow,))
        for case in cases
    ]
