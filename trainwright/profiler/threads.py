"""Sets the number of threads of torch's CPU kernels, on which their workspaces depend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Run torch's kernels, and predict their workspaces, with `num_threads` while the context lasts; None changes nothing.

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
