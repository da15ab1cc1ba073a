"""Training under a sync method: who gets which batches, and the step that exchanges in place of the optimizer's own.

a stream of batches   → each step takes one a replica, in order, and this replica trains on its own      `Dealt`
a step                → forward, backward, `sync.step(loss)`; or a closure, where the method wants one   `SyncStep`
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .artifacts import Plan, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .runtime import ParallelModule
    from .sync import Sync, SyncRecord


@dataclass(frozen=True)
class SyncOptions:
    """The method of a run as the user asked for it: its name, and its options by name."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def record(self) -> SyncRecord:
        """The method's record; `UserError` for an unknown name."""
        from . import sync

        return sync.record(self.name)

    def check(
        self, plan: Plan, optimizer: str | None = None, takes_loss: bool = False, beside: Sequence[str] = ()
    ) -> None:
        """Raise `UserError` for what is known to be impossible before any rank has started.

        optimizer: the name of the one that runs, `None` for one without a name. takes_loss: it is given the loss itself. beside:
        what else the user asked for that chooses the examples of a step.
        """
        from .sync import check_options

        record = self.record
        check_options(record, self.options)
        if beside:
            raise UserError(
                f"{beside[0]} chooses the batches of all ranks, and a sync method deals them out to replicas; got both; leave one "
                "of them out"
            )
        if plan.num_ranks > 1 and record.cls.needs_whole:
            raise UserError(
                f"{record.name} needs a whole model on each worker: {record.cls.needs_whole}; this plan shards it over "
                f"{plan.num_ranks} ranks; take another method, or a plan for one device"
            )
        if record.cls.needs_loop:
            raise UserError(
                f"a loop of its own is needed for {record.name}: {record.cls.needs_loop}; write it with tw.sync.create, or take "
                "another method"
            )
        if takes_loss:
            raise UserError(
                f"an optimizer that steps on gradients is needed beside a sync method; {optimizer or 'this one'} takes the loss "
                "itself; take adamw or sgd"
            )
        if optimizer is not None and record.cls.optimizers and optimizer not in record.cls.optimizers:
            names = " or ".join(record.cls.optimizers)
            raise UserError(
                f"{names} is needed for {record.name}; got {optimizer}; take one of these, or another method"
            )
        if self.options.get("asynchronous"):
            raise UserError(
                "a method whose workers all take the same number of steps is needed here; asynchronous lsgd ends by rounds; leave "
                "asynchronous out, or write the loop with tw.sync.create and end it by sync.method.num_rounds"
            )
        if record.cls.grows_batches:
            raise UserError(
                f"batches of one size are what a plan runs; {record.name} grows them; write the loop with tw.sync.create and draw "
                "sync.method.batch_size examples, or take local-sgd"
            )

    def make(self, module: ParallelModule, optimizer: torch.optim.Optimizer) -> Sync:
        """Join the method on this rank, with all others."""
        from . import sync

        return sync.create(self.name, module, optimizer, **self.options)


def check_replicas(given: int | None, plan: Plan, num_ranks: int | None, sync: str | None) -> int:
    """Return how many replicas a run has; num_ranks: the ranks that there are, None where they are still to be started.

    Raises `UserError` where the ranks do not make up whole replicas, and for replicas that nothing keeps together.
    """
    if given is not None and given < 1:
        raise UserError(f"a number of replicas is needed, 1 or more; got {given}; try 2")
    if given is None and sync is not None:
        if num_ranks is None:
            raise UserError(
                f"the number of replicas is needed for --sync, each of which runs the plan on {plan.num_ranks} ranks; got none; "
                "add --replicas N"
            )
        given = max(1, num_ranks // plan.num_ranks)
    number = given or 1
    if number > 1 and sync is None:
        raise UserError(f"a method that keeps {number} replicas together is needed; got none; add --sync NAME")
    if num_ranks is not None and num_ranks != number * plan.num_ranks:
        raise UserError(
            f"{number * plan.num_ranks} ranks are needed for {number} replicas of a plan for {plan.num_ranks}; there are "
            f"{num_ranks}; start as many, or change --replicas"
        )
    return number


class Dealt:
    """The batches of one replica: a step takes one a replica from the stream, in the order of replicas.

    batches_from(n): the stream from batch n on, the same on all ranks. num_batches: how many have been taken by all
    together, which checkpoints keep. Methods that compute chunks more than once find all batches of the step in `dealt`.
    """

    def __init__(self, batches_from: Callable[[int], Iterable[Any]], num_chunks: int, index: int) -> None:
        self.num_batches = 0
        self.dealt: list[Any] = []
        self._batches_from, self._num_chunks, self._index = batches_from, num_chunks, min(index, num_chunks - 1)

    def start_at(self, num_batches: int) -> None:
        """Go on after so many batches."""
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self._batches_from(self.num_batches))
        while True:
            dealt = []
            for _ in range(self._num_chunks):
                try:
                    dealt.append(next(stream))
                except StopIteration:
                    return
            self.dealt = dealt
            self.num_batches += self._num_chunks
            yield dealt[self._index]


class SyncStep:
    """A training step by `sync.step`; called as `train_step` is.

    A step that may not be made, since its loss or gradients are not finite, counts as a gradient of zero: the others wait
    for this replica's part of the exchange, and its loss is NaN, so that it never leads.
    """

    def __init__(self, sync: Sync, batches: Dealt) -> None:
        self.sync, self.batches = sync, batches
        self._bytes_before = sync.traffic.sent_bytes

    def __call__(
        self,
        module: ParallelModule,
        optimizer: torch.optim.Optimizer,
        part: Any,
        may_update: Any = None,
        batch: Any = None,
    ) -> Tensor:
        """Run one step on the rank's part of its replica's batch, and return the replica's loss before it; NaN where the
        method had it compute none.
        """
        activity = module.communicator.activity
        engine = self.sync.engine
        assert engine is not None
        engine.waiting = lambda: activity.awaiting(f"the exchange of {self.sync.record.name}")
        if self.sync.record.takes == "closure":
            return self._by_closure(module, batch)
        return self._by_gradients(module, optimizer, part, may_update)

    def told(self) -> dict[str, int]:
        """Return what this rank has sent in the step, and the steps so far in which it exchanged anything."""
        so_far = self.sync.traffic.sent_bytes
        sent, self._bytes_before = so_far - self._bytes_before, so_far
        return {"sync_bytes": sent, "sync_rounds": self.sync.num_rounds}

    def _by_gradients(self, module: ParallelModule, optimizer: Any, part: Any, may_update: Any) -> Tensor:
        import torch

        from .runtime.training.train import loss_with_gradients

        loss = loss_with_gradients(module, optimizer, part)
        counts: Any = loss.detach()
        activity = module.communicator.activity
        with activity.doing("the optimizer's step"):
            if may_update is not None and not may_update(loss):
                counts = torch.full_like(loss.detach(), math.nan)
                for param in module.parameters():
                    param.grad = torch.zeros_like(param) if param.requires_grad else None
            began, exchanged_s = time.perf_counter(), activity.comm_s
            self.sync.step(counts, _num_rows(module.plan, part))
            activity.update_s += time.perf_counter() - began - (activity.comm_s - exchanged_s)
        return loss.detach()

    def _by_closure(self, module: ParallelModule, batch: Any) -> Tensor:
        import torch

        losses: list[float] = []
        num_chunks, before = getattr(self.sync.method, "num_chunks", None), module.num_steps

        def closure(index: int = 0) -> Tensor:
            module.num_steps = before
            loss = _loss(module, batch if num_chunks is None else self.batches.dealt[index])
            losses.append(float(loss.detach()))
            return loss if num_chunks is None else loss / num_chunks

        self.sync.step(closure)
        module.num_steps = before + 1
        return torch.tensor(math.fsum(losses) / len(losses) if losses else math.nan)


def _num_rows(plan: Plan, part: Any) -> int:
    from .runtime.batch import rows_in, shapes_of
    from .runtime.entries import check_entries

    return rows_in(plan, shapes_of(plan, check_entries(plan, part)))


def _loss(module: ParallelModule, batch: Any) -> Tensor:
    from .capture.call import find_loss

    part = module.plan.shard_batch(batch, rows="all")
    return find_loss(module(**part) if isinstance(part, dict) else module(*part))
