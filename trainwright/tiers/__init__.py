"""Uses disks, or the memory of a device's host, as a tier: stores of named bytes.

`TierStore`     striped files, with direct I/O, checksums and versions
`MemoryStore`   buffers in the host's memory
"""

from .buffers import ALIGNMENT, BufferPool, aligned_empty, padded
from .copies import Copies, Copy, copies_of
from .counting import DIRECTIONS, Moved, Traffic, now
from .faults import KINDS, Fault, TierFault
from .mapped import parameters_in_files, release_pages
from .memory import MemoryStore
from .places import check_folders
from .schedule import (
    PLACES,
    Layer,
    Policy,
    Rates,
    StepTime,
    StepTraffic,
    bound_s,
    held_beside,
    placed,
    simulate,
    traffic,
)
from .store import CHUNK_BYTES, StoreOptions, TierStore, Transfer
from .throttle import TokenBucket

__all__ = [
    "ALIGNMENT",
    "CHUNK_BYTES",
    "DIRECTIONS",
    "KINDS",
    "PLACES",
    "BufferPool",
    "Copies",
    "Copy",
    "Fault",
    "Layer",
    "MemoryStore",
    "Moved",
    "Policy",
    "Rates",
    "StepTime",
    "StepTraffic",
    "StoreOptions",
    "TierFault",
    "TierStore",
    "TokenBucket",
    "Traffic",
    "Transfer",
    "aligned_empty",
    "bound_s",
    "check_folders",
    "copies_of",
    "held_beside",
    "now",
    "padded",
    "parameters_in_files",
    "placed",
    "release_pages",
    "simulate",
    "traffic",
]
