"""What this machine has: the memory that the process may really use, and a fingerprint to recognise it by."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from ..launch.cores import num_cores


def memory_bytes() -> int:
    """Return the memory that this process may use, in bytes: all of the machine's, or its container's limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(physical, int(limit)) if limit.isdigit() else physical


def cpu_name() -> str:
    """Return the processor's name as the system states it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the processor's instruction sets as Linux names them; empty where it does not say."""
    return frozenset(_cpuinfo("flags").split())


def fingerprint() -> str:
    """Return a short hash of processor, cores and memory (in GiB): another machine has another one."""
    text = f"{platform.machine()}|{cpu_name()}|{num_cores()}|{memory_bytes() >> 30}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cpuinfo(key: str) -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf8")
    except OSError:
        return ""
