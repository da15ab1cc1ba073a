"""Which examples each rank loads: `plan.sampler` for a `DataLoader`.

A plan fixes the global batch; of it a rank needs the rows that its part of the batch's first dim covers. Which examples
stand in a batch is `ExampleOrder`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

from torch.utils.data import Sampler

from ..artifacts import Plan, UserError
from .batch import coordinates, global_batch_size, own_rows
from .order import ExampleOrder
from .padding import check_padding


class PlanSampler(Sampler[list[int]]):
    """Yield this rank's rows of each global batch, an epoch an iteration: a `DataLoader`'s `batch_sampler`.

    The loader's batches then hold this rank's rows alone; `plan.shard_batch` cuts what else the plan splits. Where entries of
    the batch are split differently, or not at all, every rank loads all rows.

    dataset: anything with a length. shuffle: another order each epoch, from `seed`, the same on all ranks.
    last: what becomes of the examples that do not fill a batch: `drop` leaves them out (of this epoch), `pad` fills the batch
    with examples that have no weight in the loss, for which the dataset has to be a `PaddedDataset`.

    Not for iterable datasets, which have no order to choose from: give each rank the global batch and call
    `plan.shard_batch`.

    Raises `UserError` for fewer examples than a batch, and where a rank would have no row at all.

    >>> from trainwright.artifacts import BatchEntry
    >>> entry = BatchEntry(shape=(4, 3), dtype="float32", layout=("S0",))
    >>> plan = Plan.model_construct(batch={"x": entry}, mesh={"a0": 2})       # of a plan, what a sampler reads
    >>> list(PlanSampler(plan, range(10), shuffle=False, coords=(1,)))
    [[2, 3], [6, 7]]
    """

    def __init__(
        self,
        plan: Plan,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "drop",
        coords: Sequence[int] | None = None,
    ) -> None:
        mesh = tuple(plan.mesh.values())
        self.order = ExampleOrder(len(dataset), global_batch_size(plan), seed=seed, shuffle=shuffle, last=last)
        check_padding(last, dataset)
        self.rows = own_rows(plan, tuple(coords) if coords is not None else coordinates(mesh))
        self.epoch = self._first = 0
        if not self.rows:
            raise UserError(
                f"every rank needs at least one row of the batch; a batch of {self.batch_size} leaves this rank without; "
                "plan for a larger batch, or load the global batch and call plan.shard_batch"
            )

    @property
    def batch_size(self) -> int:
        """How many examples a batch holds, over all ranks."""
        return self.order.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        start = self.epoch * len(self)
        first, self.epoch, self._first = start + self._first, self.epoch + 1, 0
        for step in range(first, start + len(self)):
            batch = self.order.batch(step)
            yield [batch[row] for row in self.rows]

    def __len__(self) -> int:
        return self.order.num_batches

    def start_at(self, num_batches: int) -> None:
        """Go on after so many batches of the whole run, past epochs included."""
        self.epoch, self._first = divmod(num_batches, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Begin with `epoch` at the next iteration; without this, each iteration is the next epoch."""
        self.epoch, self._first = epoch, 0
