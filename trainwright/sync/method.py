"""`Method`: what one worker does, a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .replica import Replica, Worker
from .requests import AllReduce, MembersChanged, Request, Steps


class Method:
    """The base of all methods; one object a worker.

    A method is its `step`, a generator that yields requests (`trainwright.sync.requests`). Its options are the keywords
    of its constructor, which raises `UserError` for those that cannot be; what it keeps between steps stands in `state`, as
    tensors and numbers, and nowhere else: checkpoints hold that and nothing more.

    >>> from trainwright.sync import Compute, simulate
    >>> class Alone(Method):
    ...     def step(self, loss, num_samples):
    ...         yield Compute()
    ...         self.replica.update()
    """

    equal_start: ClassVar[bool] = True
    """True where all workers have to begin with the same parameters."""
    of_size: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that mean nothing to another number of workers."""

    bears_changes: ClassVar[bool] = False
    """True where it goes on with whoever is there, when workers come and go."""
    keeps_places: ClassVar[bool] = False
    """True where a worker's rank says what it does, so that one that joins takes the place of one that is gone."""
    needs_whole: ClassVar[str] = ""
    """The reason why it cannot work on what one rank holds of a sharded model; empty where it treats each element alike."""
    optimizers: ClassVar[tuple[str, ...]] = ()
    """The optimizers that it goes with, by the names of `trainwright optimizers`; empty: any."""
    grows_batches: ClassVar[bool] = False
    """True where it says how many examples a step takes, which a plan, whose batch has one shape, cannot follow."""
    needs_loop: ClassVar[str] = ""
    """The reason why only a loop of one's own can run it, and no plan; empty where a plan can."""
    reads_loss: ClassVar[bool] = False
    """True where the loss decides something, so that all ranks of one replica have to have the same."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.num_steps = 0
        self.state: dict[str, Tensor | int | float] = {}

    @property
    def replica(self) -> Replica:
        """This worker's copy of the model."""
        return self.worker.replica

    def start(self) -> Steps[None]:
        """Do what has to be done before the first step: form groups, set up the state."""
        yield from ()

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        """Do one step; `num_steps` is its number already, from 1."""
        raise NotImplementedError

    def finish(self) -> Steps[None]:
        """Give all workers the same parameters, those to evaluate or keep: their mean, unless the method knows better."""
        self.replica.write((yield from self.mean(self.replica.read())))

    def mean(self, vector: Tensor) -> Steps[Tensor]:
        """Return the mean over all workers."""
        total: Tensor = yield from self.again(lambda: AllReduce(vector))
        return total / self.worker.size

    def again(self, request: Callable[[], Request]) -> Steps[Any]:
        """Ask until all who are there have the answer: a request a set of members, for the own rank may have changed."""
        while True:
            try:
                return (yield request())
            except MembersChanged:
                continue

    def resized(self) -> None:
        """Take in that `worker` has another rank or another size; called where workers come and go, between requests."""
