"""Look for garbage in cycles less often while millions of small objects are made, few of them in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_COLLECT_EVERY = 200_000


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Collect after 200,000 new objects instead of 700; as a decorator, while the function runs.

    A fifth of the time of planning went into collections, and as much of the time that imports take.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _COLLECT_EVERY) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
