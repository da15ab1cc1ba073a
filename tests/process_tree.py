"""Which processes a run has: one child that forks, and the ranks that it forked."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process has started, in order."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def ranks_of(pid: int) -> list[int]:
    """The ranks of a run on CPUs."""
    return [rank for child in children(pid) for rank in children(child)]


def is_alive(pid: int) -> bool:
    """Tell whether process `pid` runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def sessions_of(pids: list[int]) -> list[int]:
    """The processes that belong to the sessions which `pids` lead: they and all that they started."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) in pids and is_alive(int(entry.name)):
                members.append(int(entry.name))
    return members


def assert_ended(pids: list[int], within_s: float = 5.0) -> None:
    assert pids
    deadline = time.monotonic() + within_s
    while sessions_of(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sessions_of(pids) == []
