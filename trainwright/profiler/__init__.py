"""Profiles a training step of a model: the memory, FLOPs and seconds that it takes on a device."""

from .kernels.allocator import AllocatorRecord, ForwardMarks, measure, peak_on_gpu, static_bytes, storage_bytes
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
    "peak_on_gpu",
    "profile",
    "reference_step",
    "static_bytes",
    "storage_bytes",
]
