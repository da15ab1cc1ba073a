"""Processes and process groups: `run_processes` starts ranks, `process_group` joins torchrun's."""

from .group import process_group, rank, world_size
from .processes import WorkerError, Workers, run_processes
from .worker import emit, fail, listening

__all__ = [
    "WorkerError",
    "Workers",
    "emit",
    "fail",
    "listening",
    "process_group",
    "rank",
    "run_processes",
    "world_size",
]
