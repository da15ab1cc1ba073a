"""The number of threads that kernels run with, on which what they take for themselves depends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Let torch's kernels, and what is predicted of them, have `num_threads`; None: as many as they have.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
