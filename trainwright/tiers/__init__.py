"""Uses disks as a tier of memory: a store of named bytes in striped files, with direct I/O, checksums and versions."""

from .buffers import ALIGNMENT, BufferPool, aligned_empty, padded
from .counting import DIRECTIONS, Moved, Traffic, now
from .faults import KINDS, Fault, TierFault
from .mapped import parameters_in_files, release_pages
from .places import check_folders
from .schedule import Layer, Policy, Rates, StepTime, StepTraffic, bound_s, held_beside, placed, simulate, traffic
from .store import CHUNK_BYTES, StoreOptions, TierStore, Transfer
from .throttle import TokenBucket

__all__ = [
    "ALIGNMENT",
    "CHUNK_BYTES",
    "DIRECTIONS",
    "KINDS",
    "BufferPool",
    "Fault",
    "Layer",
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
    "held_beside",
    "now",
    "padded",
    "parameters_in_files",
    "placed",
    "release_pages",
    "simulate",
    "traffic",
]
