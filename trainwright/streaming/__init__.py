"""Trains by MeZO with streamed blocks, which rest in the host's memory or on a disk and are loaded once a step."""

from .blocks import Part, Parts, block_names, find_parts
from .exchange import ByteExchange
from .planning import check_plan, plan_stream
from .predict import check_fits, cost_of_step, peak_of_step, predicted_peak
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
    "check_plan",
    "cost_of_step",
    "find_parts",
    "from_safetensors",
    "peak_of_step",
    "plan_stream",
    "predicted_peak",
    "without_values",
]
