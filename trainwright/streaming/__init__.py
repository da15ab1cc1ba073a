"""Zeroth-order training by streaming: a model's blocks rest in the host's memory or on a disk and come in once a step."""

from .blocks import Part, Parts, block_names, find_parts
from .exchange import ByteExchange
from .predict import peak_of_step, predicted_peak
from .store import BlockStore, DiskStore, HostStore
from .streamed import Streamed

__all__ = [
    "BlockStore",
    "HostStore",
    "Part",
    "Parts",
    "Streamed",
    "block_names",
    "find_parts",
    "peak_of_step",
    "predicted_peak",
]
