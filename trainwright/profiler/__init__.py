"""Program or model → Profile: storages' lifetimes, FLOPs, a target's differences, time."""

from .kernels.allocator import AllocatorRecord, ForwardMarks, measure, static_bytes, storage_bytes
from .profile import profile
from .step import reference_step
from .time import op_seconds
from .tracker import MemoryTracker

__all__ = [
    "AllocatorRecord",
    "ForwardMarks",
    "MemoryTracker",
    "measure",
    "op_seconds",
    "profile",
    "reference_step",
    "static_bytes",
    "storage_bytes",
]
