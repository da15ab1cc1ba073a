"""Disks as a tier of memory: named bytes in striped files, moved directly, checked, versioned, bounded and counted."""

from .buffers import ALIGNMENT, BufferPool, aligned_empty, padded
from .faults import KINDS, Fault, TierFault
from .places import check_folders
from .store import CHUNK_BYTES, StoreOptions, TierStore, Transfer
from .throttle import TokenBucket
from .traffic import Moved, Traffic, now

__all__ = [
    "ALIGNMENT",
    "CHUNK_BYTES",
    "KINDS",
    "BufferPool",
    "Fault",
    "Moved",
    "StoreOptions",
    "TierFault",
    "TierStore",
    "TokenBucket",
    "Traffic",
    "Transfer",
    "aligned_empty",
    "check_folders",
    "now",
    "padded",
]
