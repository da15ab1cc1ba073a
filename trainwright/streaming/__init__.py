"""Trains by MeZO with streamed blocks, which rest in the host's memory or on a disk and are loaded once a step."""

from .blocks import Part, Parts, block_names, find_parts
from .exchange import ByteExchange
from .predict import check_fits, peak_of_step, predicted_peak
from .store import BlockStore, DiskStore, HostStore
from .streamed import Streamed
from .weights import from_safetensors, without_values

__all__ = [
    "BlockStore",
    "ByteExchange",
    "DiskStore",
    "HostStore",
    "Part",
    "Parts",
    "Streamed",
    "block_names",
    "check_fits",
    "find_parts",
    "from_safetensors",
    "peak_of_step",
    "predicted_peak",
    "without_values",
]
