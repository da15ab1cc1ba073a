"""Defines `Sync`, by which a training loop uses a method with a model and an optimizer."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..artifacts import UserError
from .as_optimizer import SyncOptimizer
from .coded import Coded
from .elastic import Elastic
from .hub import Hub
from .method import Method
from .options import check_options, described, options_of
from .ranks import Ranks
from .record import AGREEMENT_BYTES, Size, SyncRecord
from .replica import Replica, Worker
from .requests import Absent, AllGather, Compute, Count, Form, Identify, MembersChanged, Now, RankAndSize, Steps
from .traffic import Traffic

_DIGEST = 32


class Sync:
    """A method that this worker has joined, as `create` and `join` return it: call `step(loss)` instead of `optimizer.step()`.

    method: the method, with its numbers (`num_steps`, a batch size, a leader) as attributes. record: its declarations.
    """

    def __init__(
        self, record: SyncRecord, method: Method, options: Mapping[str, Any], engine: Ranks | None = None
    ) -> None:
        self.record, self.method, self.options, self.engine = record, method, dict(options), engine
        self.num_rounds = 0
        """The number of steps so far in which this worker communicated."""

    def step(self, loss: Any = None, num_samples: int = 1) -> None:
        """Run one step together with the other workers: communicate as the method does, and update the parameters.

        loss: this worker's loss, after `loss.backward()`; for methods that take a closure, a function that returns one.
        num_samples: the number of examples over which the loss is a mean, if workers have unequal numbers of them.
        """
        if self.engine is None:
            raise UserError(
                "a process group is needed for sync.step; this one was joined in a program; write `yield from sync.steps(loss)`"
            )
        self.engine.run(self.steps(loss, num_samples))

    def steps(self, loss: Any = None, num_samples: int = 1) -> Steps[None]:
        """Run `step` as a program, for `simulate` and `Ranks.run`: `yield from sync.steps(loss)`."""
        if self.record.takes == "closure" and not callable(loss):
            raise UserError(
                f"{self.record.name} needs a function that computes a loss; got {type(loss).__name__}; give sync.step(closure)"
            )
        self.method.num_steps += 1
        exchanged = yield from _without_gradients(self.method.step(self._decided(loss), num_samples))
        self.num_rounds += exchanged > 0

    def _decided(self, loss: Any) -> Any:
        """Return the loss of the replica's first rank on all its ranks, between which a sum's last bit may differ."""
        replicas = getattr(self.method.replica.model, "replicas", None)
        if not self.method.reads_loss or replicas is None or replicas.size == 1:
            return loss
        told = torch.tensor([float(loss)], dtype=torch.float64)
        dist.broadcast(told, replicas.ranks[0], group=replicas.inside)
        return float(told)

    def finish(self) -> None:
        """Set all workers' parameters to the final ones, to be evaluated or kept, and end the messages in flight.

        All workers call it after the last step.
        """
        assert self.engine is not None
        self.engine.run(self.finishing())
        self.engine.close()

    def finishing(self) -> Steps[None]:
        """Run `finish` as a program, without ending the messages in flight."""
        yield from _without_gradients(self.method.finish())

    def as_optimizer(self) -> SyncOptimizer:
        """Return an optimizer whose `step()` calls `step(loss)`, for Hugging Face's Trainer, Accelerate and their like.

        >>> from trainwright import sync
        >>> model = nn.Linear(2, 1)
        >>> joined = sync.create("local-sgd", model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer = joined.as_optimizer()
        >>> model(torch.ones(3, 2)).mean().backward()
        >>> optimizer.step()
        >>> joined.method.num_steps
        1
        """
        return SyncOptimizer(self)

    @property
    def traffic(self) -> Traffic:
        """Return the traffic that this worker has sent since `create`, the agreement before the first step included."""
        assert self.engine is not None
        return self.engine.traffic

    @property
    def size(self) -> Size:
        """Return the size of this run, on which the record's numbers depend."""
        worker, replica = self.method.worker, self.method.replica
        return Size(replica.shapes, replica.dtype.itemsize, worker.size, self.options, replica.dims)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this worker's checkpoint needs beside model and optimizer: plain values and tensors."""
        kept = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in self.method.state.items()
        }
        return {
            "method": self.record.name,
            "num_workers": self.method.worker.size,
            "num_steps": self.method.num_steps,
            "num_rounds": self.num_rounds,
            "state": kept,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Restore a `state_dict`; with this worker's own, the run continues bit for bit.

        From a run with another number of workers, entries that depend on that number keep their initial values; their names are
        returned. Raises `UserError` for the state of another method or another model.
        """
        own = self.method.state
        if saved.get("method") != self.record.name:
            raise UserError(
                f"a state of {self.record.name} is needed; got one of {saved.get('method')}; create that method to go on from it"
            )
        same_size = saved["num_workers"] == self.method.worker.size
        left = () if same_size else tuple(name for name in self.method.of_size if name in saved["state"])
        taken = {name: value for name, value in saved["state"].items() if name not in left}
        for name, value in taken.items():
            if isinstance(value, Tensor) and name in own and value.shape != own[name].shape:  # type: ignore[union-attr]
                raise UserError(
                    f"the model of the checkpoint is needed; its {name} has {value.numel()} elements, here it has "
                    f"{own[name].numel()}; build that model"  # type: ignore[union-attr]
                )
        own.update({name: value.clone() if isinstance(value, Tensor) else value for name, value in taken.items()})
        self.method.num_steps, self.num_rounds = saved["num_steps"], saved["num_rounds"]
        return left

    def close(self) -> None:
        """End the messages in flight, as `finish` does; all workers call it at the end.

        The transport aborts a process that ends with messages in flight.
        """
        if self.engine is not None:
            self.engine.close()


def join(record: SyncRecord, model: nn.Module, optimizer: Any, options: Mapping[str, Any]) -> Steps[Sync]:
    """Return a `Sync` on this worker, after agreement with all others; a program."""
    place = yield Identify()
    filled = {**options_of(record.cls), **record.defaults, **options}
    method, replica, problem = None, None, ""
    try:
        check_options(record, options)
        replica = Replica(model, optimizer)
        _check_whole(record, replica)
        method = record.cls(Worker(place.rank, place.size, replica), **{**record.defaults, **options})
    except UserError as error:
        problem = str(error)
    chosen = hashlib.sha256(described(record, filled).encode()).digest()
    start = replica.digest() if replica is not None and getattr(method, "equal_start", False) else bytes(_DIGEST)
    yield from _agree(place, problem, chosen, start)
    assert method is not None
    yield from _without_gradients(method.start())
    return Sync(record, method, filled)


def adopt(record: SyncRecord, model: nn.Module, optimizer: Any, options: Mapping[str, Any], engine: Elastic) -> Sync:
    """Return a `Sync` on a worker that joins a run, with the first member's parameters and state."""
    check_options(record, options)
    replica = Replica(model, optimizer)
    place = engine.place
    _check_whole(record, replica)
    method = record.cls(Worker(place.rank, place.size, replica), **{**record.defaults, **options})
    sync = Sync(record, method, {**options_of(record.cls), **record.defaults, **options}, engine)
    attach(sync, engine)
    engine.run(_without_gradients(method.start()))
    if isinstance(method, Coded):
        engine.run(_without_gradients(method.take_up()))
    else:
        taken_over(sync, engine.share(None))
    return sync


def attach(sync: Sync, engine: Elastic) -> None:
    """Connect the method to changes of the members; a method that needs all workers raises the names of those gone."""
    if isinstance(engine, Hub):
        engine.check_alike(described(sync.record, sync.options))
    engine.on_change = lambda place, gone: _resize(sync, place, gone)
    engine.on_newcomers = lambda: taken_over(sync, engine.share(_shared(sync) if engine.place.rank == 0 else None))


def taken_over(sync: Sync, data: bytes) -> None:
    """Set parameters and state from `data` on a worker that has just joined."""
    if sync.method.num_steps or not isinstance(sync.engine, Elastic) or not sync.engine.is_new:
        return
    saved = torch.load(io.BytesIO(data), weights_only=True)
    if saved["options"] != described(sync.record, sync.options):
        raise UserError(
            "the method and options of the run are needed to join it; those given are others; give the same"
        )
    sync.method.replica.write(saved["parameters"])
    if sync.method.replica.optimizer is not None:
        sync.method.replica.optimizer.load_state_dict(saved["optimizer"])
    sync.load_state_dict({**saved["sync"], "num_workers": sync.method.worker.size})


def _shared(sync: Sync) -> bytes:
    replica, held = sync.method.replica, io.BytesIO()
    saved = {
        "parameters": replica.read(),
        "optimizer": replica.optimizer.state_dict() if replica.optimizer is not None else None,
        "sync": sync.state_dict(),
        "options": described(sync.record, sync.options),
    }
    torch.save(saved, held)
    return held.getvalue()


def _resize(sync: Sync, place: RankAndSize, gone: list[str]) -> None:
    method = sync.method
    if not method.bears_changes:
        raise UserError(
            f"{sync.record.name} needs all its workers; {' and '.join(gone)} gone; start them all again from a checkpoint, or take "
            "diloco, local-sgd, easgd, lsgd, decentlam, gossip or just-one-byte, which go on"
        )
    method.worker = Worker(place.rank, place.size, method.replica)
    method.resized()


def _without_gradients(program: Steps[None]) -> Steps[int]:
    """Run `program` under `no_grad`, but not across its yields, during which other workers of this process may run.

    Returns the number of messages and collectives that it requested.
    """
    answer: Any = None
    changed: MembersChanged | None = None
    asked = 0
    while True:
        with torch.no_grad():
            try:
                request = program.send(answer) if changed is None else program.throw(changed)
            except StopIteration:
                return asked
        asked += not isinstance(request, Compute | Now | Count | Identify | Form | Absent)
        try:
            answer, changed = (yield request), None
        except MembersChanged as change:
            changed = change


def _check_whole(record: SyncRecord, replica: Replica) -> None:
    if replica.is_sharded and record.cls.needs_whole:
        raise UserError(
            f"{record.name} needs a whole model on each worker: {record.cls.needs_whole}; this one is sharded by a plan; take a "
            "method that treats each element alike (diloco, lsgd, decentlam), or a plan for one device"
        )


def _agree(place: RankAndSize, problem: str, chosen: bytes, start: bytes) -> Steps[None]:
    """Raise the same `UserError` on all workers if one has a problem, or if they differ."""
    text = problem.encode()[: AGREEMENT_BYTES - 2 * _DIGEST]
    own = torch.frombuffer(bytearray((chosen + start + text).ljust(AGREEMENT_BYTES, b"\0")), dtype=torch.uint8)
    rows = yield AllGather(own)
    if not text and torch.equal(rows, own.expand_as(rows)):
        return
    shown = [bytes(row.tolist()) for row in rows]
    for rank, row in enumerate(shown):
        if said := row[2 * _DIGEST :].rstrip(b"\0").decode(errors="ignore"):
            raise UserError(said if place.size == 1 else f"{said} (worker {rank})")
    what = {"the same method and options": slice(_DIGEST), "equal parameters at the start": slice(_DIGEST, 2 * _DIGEST)}
    for needed, part in what.items():
        odd = [rank for rank, row in enumerate(shown) if row[part] != shown[0][part]]
        if odd:
            raise UserError(
                f"{needed} are needed on all workers; those of worker {odd[0]} differ from worker 0's; give all the same"
                + (", by one seed or from one checkpoint" if "param" in needed else "")
            )
