"""Which processes a run has: one child that forks, and the ranks that it forked."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process has started, in order."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def ranks_of(pid: int) -> list[int]:
    """The ranks of a run on CPUs."""
    return [rank for child in children(pid) for rank in children(child)]
