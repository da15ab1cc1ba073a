"""Makes the C library keep the memory that a step on the CPU has freed.

Every step frees all that it allocated. Glibc then returns the top of its heap to the system, and the next step gets it
again page by page, each cleared first: 2 to 8 % of a step of a small model. Memory that is kept costs nothing to get
again, and the process holds no more than at its peak.

Where parameters and states come and go within a step (a tier), kept memory is the wrong memory: parameters, gradients and
states of many sizes leave gaps in the heap that the next ones do not fit, and the heap grows. There each tensor has a mapping
of its own, given back at once.
"""

from __future__ import annotations

import ctypes
import os

LARGEST_KEPT_BYTES = 32 * 2**20
"""Larger tensors get a mapping of their own, unmapped when freed; glibc allows no higher limit for its heap."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
OWN_MAPPING_BYTES = 128 * 2**10
"""The size from which an allocation gets a mapping of its own, which is given back when freed: glibc's default threshold."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_NEVER = -1


def keep_freed_memory() -> bool:
    """Make glibc keep the memory that this process frees; return whether it does from now on.

    Nothing is changed if the environment configures malloc (`MALLOC_TRIM_THRESHOLD_` and its like, `GLIBC_TUNABLES`), or if
    the C library is not glibc.
    """
    return _set_thresholds(LARGEST_KEPT_BYTES, _NEVER)


def give_freed_memory_back() -> bool:
    """Let this process give what it frees back at once; return whether it does from now on. As `keep_freed_memory` else."""
    return _set_thresholds(OWN_MAPPING_BYTES, OWN_MAPPING_BYTES)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> bool:
    if any(name in os.environ for name in SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):  # others mean other things by `mallopt`
            return False
        mallopt = library.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_bytes)) and bool(mallopt(_TRIM_THRESHOLD, trim_bytes))
