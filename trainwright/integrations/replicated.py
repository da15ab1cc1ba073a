"""Replicas of a plan in other libraries' loops: which processes are one, the method between them, what all have together.

processes 0 … k − 1 of N·k    replica 0, of a plan for k ranks: batches of its own, a gradient of its own
the optimizer of the loop      `sync.as_optimizer()`: its step exchanges as the method says
outputs, losses, metrics       of all replicas, joined in their order
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import Plan, UserError
from ..launch import Replicas, replica_folder
from ..runtime import Checkpointer, ParallelModule
from ..runtime.checkpoint.checkpoint import MARKER, complete
from ..sync import Sync, record
from ..sync.as_optimizer import SyncOptimizer
from ..syncing import SyncOptions
from .planned import check_num_processes


class Replication:
    """The replicas of a run: one of them without a method, whatever the processes make up with one.

    sync, options: the method's name, and its options by name. Raises `UserError` for a method that this plan, or a loop that
    calls the optimizer, cannot take.

    >>> import trainwright as tw
    >>> plan = tw.plan(torch.nn.Linear(3, 1), (torch.ones(4, 3),), hardware="cpu:1", loss_fn=lambda out, batch: out.mean())
    >>> Replication(plan, "local-sgd", {"period": 4}).check(3, "Accelerate")
    3
    """

    def __init__(self, plan: Plan, sync: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.plan, self.number = plan, 1
        self.chosen = SyncOptions(sync, options or {}) if sync is not None else None
        self.sync: Sync | None = None
        """The method, once it was joined."""
        if self.chosen is None:
            if options:
                raise UserError(f"a method is needed for sync_options; got {dict(options)} alone; give sync= its name")
            return
        self.chosen.check(plan)
        if record(self.chosen.name).takes == "closure":
            raise UserError(
                f"a method that takes a loss after its backward is needed in this loop; {self.chosen.name} takes a closure; take "
                "another one, or trainwright train --sync"
            )

    def check(self, num_processes: int, by: str) -> int:
        """Return how many replicas so many processes are; `UserError` where they are no whole number of them."""
        self.number = check_num_processes(self.plan, num_processes, by, replicated=self.chosen is not None)
        return self.number

    def index(self, rank: int) -> int:
        """Return the replica that a process belongs to."""
        return rank // self.plan.num_ranks

    def joined(self, module: ParallelModule, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer whose step exchanges, or the one given where there is no method; a collective call."""
        if self.chosen is None or isinstance(optimizer, SyncOptimizer):
            return optimizer
        if self.sync is not None:
            raise UserError(
                "one optimizer is needed beside a sync method; got a second; put its parameters into a group"
            )
        self.sync = self.chosen.make(module, optimizer)
        return self.sync.as_optimizer()

    def finish(self) -> None:
        """Give all replicas the same parameters, those to evaluate or keep; a collective call, after the last step."""
        if self.sync is not None:
            self.sync.finish()


def without_sync(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside one that exchanges."""
    return optimizer.inner if isinstance(optimizer, SyncOptimizer) else optimizer


def folder_of(folder: Path, here: Replicas) -> Path:
    """Return the folder of this replica's checkpoints in that of a run."""
    return folder if here.is_only else folder / replica_folder(here.index)


def restored(checkpointer: Checkpointer, folder: Path, here: Replicas) -> bool:
    """Restore the newest checkpoint under the `folder` of a run; `False` where there is none; a collective call.

    Of another number of replicas, a new one begins with the state of one that was there.
    """
    num_saved = len({path.parent.parent for path in folder.glob(f"{replica_folder('*')}/step-*/{MARKER}")})
    if here.is_only or not num_saved:
        return checkpointer.load_latest() is not None
    checkpointer.load(complete(folder / replica_folder(here.index % num_saved))[-1])
    return True


def joined_rows(tensor: Tensor, here: Replicas) -> Tensor:
    """Return the tensors of all replicas as one, row after row in the order of replicas; a collective call.

    Replicas may have other numbers of rows; a tensor without rows counts as one.
    """
    if here.is_only:
        return tensor
    own = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
    counts: list[Any] = [None] * here.number
    dist.all_gather_object(counts, tuple(own.shape), group=here.across)
    shape = tuple(map(max, zip(*counts)))  # padded alike, and cut again
    room = own.new_zeros(shape)
    room[tuple(slice(length) for length in own.shape)] = own
    all_of_them = [torch.empty_like(room) for _ in counts]
    dist.all_gather(all_of_them, room, group=here.across)
    return torch.cat([each[: count[0]] for each, count in zip(all_of_them, counts)])


def summed(tensor: Tensor, here: Replicas) -> Tensor:
    """Return the sum over replicas; a collective call."""
    if here.is_only:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=here.across)
    return total
