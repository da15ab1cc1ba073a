"""Processes and process groups: `run_processes` starts ranks, `init` and `process_group` join torchrun's."""

from .group import init, is_under_torchrun, process_group, rank, world_size
from .processes import WorkerError, Workers, run_processes
from .replicas import Replicas, group_inside, replica_folder, replicas_of
from .worker import emit, fail, listening

__all__ = [
    "Replicas",
    "WorkerError",
    "Workers",
    "emit",
    "fail",
    "group_inside",
    "init",
    "is_under_torchrun",
    "listening",
    "process_group",
    "rank",
    "replica_folder",
    "replicas_of",
    "run_processes",
    "world_size",
]
