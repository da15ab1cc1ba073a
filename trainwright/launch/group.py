"""The process group of this process: joined under torchrun, made of one rank elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

from ..artifacts import UserError

DeviceType = Literal["cpu", "cuda"]
_LAST_WAIT_S = 20
"""How long a rank that has come to its end waits for the others."""


@contextmanager
def process_group(device: DeviceType = "cpu") -> Iterator[None]:
    """Join the process group that the environment describes, and leave it at the end.

    Under torchrun that is the group of its ranks, elsewhere a group of this process alone. A group that the caller has
    already initialised is used, and left as it is. `device="cuda"` takes the GPU of the local rank, over NCCL.

    >>> with process_group():
    ...     rank(), world_size()
    (0, 1)
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    _join_environment(device)
    try:
        yield
    except BaseException:
        dist.destroy_process_group()
        raise
    leave()


def init(device: DeviceType | None = None) -> None:
    """Join the process group that the environment describes, until the process ends; does nothing where there is one.

    Under torchrun that is the group of its ranks, elsewhere a group of this process alone. `parallelize` calls it, so a
    script needs it only where it uses `torch.distributed` before.

    device: `cuda` takes the GPU of the local rank, over NCCL, `cpu` gloo; default: `cuda` where there is a GPU.

    >>> import torch
    >>> init("cpu")
    >>> init("cpu")  # the second time, nothing is left to do
    >>> rank(), world_size()
    (0, 1)
    >>> torch.distributed.destroy_process_group()  # or, as most scripts do, leave it to the end of the process
    """
    import torch
    import torch.distributed as dist

    if device not in (None, "cpu", "cuda"):
        raise UserError(f"a device to communicate from is needed, cpu or cuda; got {device!r}; leave it out for either")
    if dist.is_initialized():
        return
    _join_environment(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    atexit.register(_leave_at_exit)


def is_under_torchrun() -> bool:
    """Return whether the environment says which of how many ranks this process is."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """Return this process's rank, from 0; 0 where there is no group."""
    return _from_group_or_environment("get_rank", "RANK", 0)


def world_size() -> int:
    """Return the number of ranks; 1 where there is no group."""
    return _from_group_or_environment("get_world_size", "WORLD_SIZE", 1)


def join(device: DeviceType, store: object | None = None, index: int = -1, num_ranks: int = -1) -> None:
    """Initialise the default process group: gloo, and NCCL beside it for `device="cuda"`."""
    import torch
    import torch.distributed as dist

    # Its functions have the default group of the moment they are defined as a default argument. Imported later, they would keep
    # that group, and gloo's threads, which abort the process where they release a tensor while Python ends.
    import torch.distributed.nn.functional

    if device == "cuda":
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise RuntimeError(
                f"a GPU for local rank {local_rank} is needed; this machine has {num_gpus}; use fewer ranks"
            )
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=num_ranks)  # type: ignore[arg-type]


def _join_environment(device: DeviceType) -> None:
    import torch.distributed as dist

    if is_under_torchrun():
        join(device, *_of_this_attempt())
    else:
        join(device, store=dist.HashStore(), index=0, num_ranks=1)


def _of_this_attempt() -> tuple[object, int, int]:
    """Return (store, rank, number of ranks) as the environment says.

    torchrun may keep its store when it starts the ranks again: under the same names gloo would find where ranks that are
    gone have listened.
    """
    import torch.distributed as dist

    store, index, num_ranks = next(iter(dist.rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}", store), index, num_ranks


def leave() -> None:
    """Destroy the default process group once every rank has come here.

    Without the barrier a rank that is late finds its peers' gloo threads gone, and aborts now and then.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _leave_at_exit() -> None:
    """Destroy the group; wait for the other ranks, but not for ever, and not where this one ends with an error."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if getattr(sys, "last_value", None) is None:
        wait_for_others()
    dist.destroy_process_group()


def wait_for_others() -> None:
    """Wait until every rank has come here, but not for ever: one may be gone, or late."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):
        dist.barrier(async_op=True).wait(timedelta(seconds=_LAST_WAIT_S))


def _from_group_or_environment(function: str, variable: str, default: int) -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return int(getattr(dist, function)())
    return int(os.environ.get(variable, default))
