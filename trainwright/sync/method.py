"""Defines `Method`, the base of all sync methods: what one worker does in each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .replica import Replica, Worker
from .requests import AllReduce, MembersChanged, Request, Steps


class Method:
    """The base of all methods; each worker has one object of it.

    A method implements `step`, a generator that yields requests (`trainwright.sync.requests`). Its options are the keywords
    of its constructor, which raises `UserError` for invalid ones. All that it keeps between steps is in `state`, as tensors
    and numbers, since checkpoints save only that.

    >>> from trainwright.sync import Compute, simulate
    >>> class Alone(Method):
    ...     def step(self, loss, num_samples):
    ...         yield Compute()
    ...         self.replica.update()
    """

    equal_start: ClassVar[bool] = True
    """True if all workers have to begin with the same parameters."""
    of_size: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that depend on the number of workers, and are not restored for another number."""

    bears_changes: ClassVar[bool] = False
    """True if the method continues with the present workers when workers come and go."""
    keeps_places: ClassVar[bool] = False
    """True if a worker's rank decides its role, so that one that joins takes the place of one that is gone."""
    needs_whole: ClassVar[str] = ""
    """The reason why it cannot work on one rank's shards of a model; empty if it treats every element in the same way."""
    optimizers: ClassVar[tuple[str, ...]] = ()
    """The optimizers that it supports, by the names of `trainwright optimizers`; empty: any."""
    grows_batches: ClassVar[bool] = False
    """True if it decides the number of examples of a step, which a plan, whose batch has one shape, does not support."""
    needs_loop: ClassVar[str] = ""
    """The reason why only the user's own loop, and no plan, can run it; empty if a plan can."""
    reads_loss: ClassVar[bool] = False
    """True if the loss decides something, so that all ranks of one replica need the same value."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.num_steps = 0
        self.state: dict[str, Tensor | int | float] = {}

    @property
    def replica(self) -> Replica:
        """Return this worker's copy of the model."""
        return self.worker.replica

    def start(self) -> Steps[None]:
        """Prepare the first step: form groups and set up the state."""
        yield from ()

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        """Run one step; `num_steps`, counted from 1, is already its number."""
        raise NotImplementedError

    def finish(self) -> Steps[None]:
        """Set all workers' parameters to the final ones, to be evaluated or kept: by default, their mean."""
        self.replica.write((yield from self.mean(self.replica.read())))

    def mean(self, vector: Tensor) -> Steps[Tensor]:
        """Return the mean of `vector` over all workers."""
        total: Tensor = yield from self.again(lambda: AllReduce(vector))
        return total / self.worker.size

    def again(self, request: Callable[[], Request]) -> Steps[Any]:
        """Yield requests until one is answered, a new one after each change of the members, in which this rank may change."""
        while True:
            try:
                return (yield request())
            except MembersChanged:
                continue

    def resized(self) -> None:
        """Adapt to a new rank or number of workers in `worker`; called between requests, where workers come and go."""
