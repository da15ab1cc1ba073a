"""Processes and process groups: `run_processes` starts ranks, `process_group` joins torchrun's."""

from .group import process_group, rank, world_size
from .processes import WorkerError, Workers, run_processes
from .worker import emit, listening

__all__ = ["WorkerError", "Workers", "emit", "listening", "process_group", "rank", "run_processes", "world_size"]
