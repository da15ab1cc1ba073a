"""How many cores there are to share out among processes."""

from __future__ import annotations

import os
from pathlib import Path


def num_cores() -> int:
    """Return how many cores this process may use: the affinity mask and a container's quota are respected."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf8").split()
    except OSError:
        return allowed
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, round(int(quota[0]) / int(quota[1]))))
    return allowed


def threads_each(num_processes: int) -> int:
    """Return with how many threads each of `num_processes` ranks runs: its share of the cores, or fewer if so set."""
    share = max(1, num_cores() // num_processes)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(wanted)) if wanted.isdigit() and int(wanted) > 0 else share
