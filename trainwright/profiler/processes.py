"""Simulates the process group of a model that the user's own code wraps: `fully_shard`, tensor parallel styles, DDP.

The function that makes and wraps the model is called in a process group whose other processes do not exist, so the tracker sees
what torch's own wrappers (for `DistributedDataParallel`, a replacement) gather, copy, hold and reduce, as it sees any other op.
Collectives overlap with the computation as the wrapper issues them:

    gather        is prefetched by one: it may start when the computation begins that the previous gather was for
    reduction     starts when its gradients are computed; the update waits for the last one
    exposed       a collective that is waited for at once (tensor parallel) adds its whole time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..artifacts import UserError
from ..hardware import collectives
from ..torch_internals import private
from ..torch_internals.trees import tensors_in
from .data_parallel import stood_in

MakeModel = Callable[[], Any]
"""A function that returns a wrapped model, alone, with a batch, or with a batch and a loss function."""


@contextmanager
def imagined(num_processes: int) -> Iterator[None]:
    """Initialise `torch.distributed` as rank 0 of `num_processes`, whose other ranks do not exist, while the context lasts."""
    import torch.distributed as dist

    if num_processes < 1:
        raise UserError(f"a number of processes of 1 or more is needed; got {num_processes}; leave it out for one")
    if dist.is_available() and dist.is_initialized():
        raise UserError(
            "a process without a process group is needed to imagine one; there is one already; profile in a process of "
            "its own, or destroy_process_group() first"
        )
    with private.imagined_group(num_processes), stood_in():
        yield


_KINDS: dict[str, collectives.Collective] = {
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "allgather_into_tensor_coalesced_":
    "all_gather", "allgather_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor":
    "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter", "allreduce_": "all_reduce",
    "all_reduce": "all_reduce", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "all_gather",
}  # fmt: skip


def is_exchange(func: Any) -> bool:
    """Tell whether `func` is an op of `torch.distributed`: a collective or a wait for one."""
    return getattr(func, "namespace", "") in ("c10d", "_c10d_functional")


def collective_of(func: Any, args: tuple[Any, ...], out: Any) -> tuple[collectives.Collective, int, list[int]] | None:
    """Return a collective's kind, bytes (of the full tensor) and ranks; None for any other op."""
    if not is_exchange(func):
        return None
    kind = _KINDS.get(str(func.overloadpacket).rpartition(".")[2])
    if kind is None:
        return None
    num_bytes = max((tensor.numel() * tensor.element_size() for tensor in tensors_in((args, out))), default=0)
    return kind, num_bytes, _ranks(args)


class Communication:
    """The schedule of the collectives that overlap with computation; the caller keeps the clock, in seconds since the step began.

    >>> beside = Communication()
    >>> beside.gather(0.0, 2.0)
    >>> clock = beside.arrived(1.0)  # waited for the first gather
    >>> beside.gather(clock + 5.0, 2.0)  # in truth issued when the computation began that the first was for
    >>> clock, beside.arrived(clock + 5.0)
    (2.0, 7.0)
    """

    def __init__(self) -> None:
        self._free_s = self._begun_s = 0.0

    def gather(self, clock_s: float, seconds: float) -> None:
        """Issue a gather that the wrapper prefetches: it may start when the computation before this one began."""
        self._free_s = max(self._free_s, min(self._begun_s, clock_s)) + seconds

    def reduce(self, clock_s: float, seconds: float) -> None:
        """Issue a collective whose input was computed at `clock_s`: it starts no earlier."""
        self._free_s = max(self._free_s, clock_s) + seconds

    def arrived(self, clock_s: float) -> float:
        """Return the clock after waiting for every collective that was issued."""
        self._begun_s = max(clock_s, self._free_s)
        return self._begun_s


def waits(func: Any) -> bool:
    """Tell whether the op needs a collective's result: `fully_shard`'s copies out of its buffers, or a wait."""
    return str(func.overloadpacket).rpartition(".")[2] in ("split_with_sizes_copy", "wait_tensor", "chunk_cat")


def is_prefetched(func: Any) -> bool:
    """Tell whether the collective is a gather that `fully_shard` prefetches."""
    return func.namespace == "c10d" and "allgather" in str(func.overloadpacket)


def _ranks(args: tuple[Any, ...]) -> list[int]:
    """Return the ranks of a collective's group, found by the group or the group's name among its arguments."""
    import torch.distributed as dist

    for value in args:
        if isinstance(value, torch.ScriptObject):
            return private.group_ranks(dist.ProcessGroup.unbox(value).group_name)
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            return private.group_ranks(value)
    return list(range(dist.get_world_size()))
