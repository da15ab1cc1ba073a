"""Samples the examples that each rank loads: `plan.sampler` for a `DataLoader`.

A plan fixes the global batch; a rank needs the rows that its part of the batch's first dim covers. `ExampleOrder` decides
which examples a batch has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Sized

from torch.utils.data import Sampler

from ...artifacts import Plan, UserError
from ..batch import coordinates, global_batch_size, own_rows
from ..entries import remember_sampler
from .order import ExampleOrder
from .padding import check_padding


class PlanSampler(Sampler[list[int]]):
    """A `DataLoader`'s `batch_sampler` that yields this rank's rows of each global batch; each iteration is one epoch.

    The loader's batches then hold only this rank's rows; `plan.shard_batch` cuts the other dims that the plan splits. If
    entries of the batch are split differently, or not at all, every rank loads all rows.

    dataset: anything with a length. shuffle: whether each epoch has another order, drawn from `seed`, the same on all ranks.
    last: the treatment of the examples that do not fill a batch: `drop` leaves them out of this epoch, `short` makes a batch
    of them, which every rank loads whole, `pad` fills the batch with examples that have no weight in the loss; the dataset
    then has to be a `PaddedDataset`.
    whole: whether every rank loads all rows, for loaders whose batches have varying lengths (padded to the longest example of a
    batch, say), which a rank cannot tell from its own rows. It is implied by `last="short"` if the short batch has as many
    rows as a rank has of a full one, and so could be mistaken for them.

    An iterable dataset has no order to choose from: give each rank the global batch and call `plan.shard_batch`.

    Raises `UserError` for fewer examples than a batch, and if a rank would have no row at all.

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
        whole: bool = False,
        coords: Sequence[int] | None = None,
    ) -> None:
        mesh = tuple(plan.inner_mesh.values())
        self.order = ExampleOrder(len(dataset), global_batch_size(plan), seed=seed, shuffle=shuffle, last=last)
        check_padding(last, dataset)
        self.num_last = self.order.num_last
        """The number of rows in the last batch of an epoch."""
        of_ranks = [len(own_rows(plan, place)) for place in itertools.product(*map(range, mesh))]
        self.whole = whole or (self.num_last < self.batch_size and self.num_last in of_ranks)
        self.rows = own_rows(plan, tuple(coords) if coords is not None else coordinates(mesh))
        if self.whole:
            self.rows = list(range(self.batch_size))
        self._deals = plan.batch, plan.inner_mesh, plan.micro_batches
        remember_sampler(self)
        self.epoch = self._first = 0
        if not self.rows:
            raise UserError(
                f"every rank needs at least one row of the batch; a batch of {self.batch_size} leaves this rank without; "
                "plan for a larger batch, or load the global batch and call plan.shard_batch"
            )

    @property
    def batch_size(self) -> int:
        """Return the number of examples in a batch, over all ranks."""
        return self.order.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        start = self.epoch * len(self)
        first, self.epoch, self._first = start + self._first, self.epoch + 1, 0
        for step in range(first, start + len(self)):
            batch = self.order.batch(step)
            yield batch if len(batch) < self.batch_size else [batch[row] for row in self.rows]

    def __len__(self) -> int:
        return self.order.num_batches

    def deals_for(self, plan: Plan) -> bool:
        """Tell whether the batches are those of `plan`."""
        return self._deals == (plan.batch, plan.inner_mesh, plan.micro_batches)

    def rows_meant(self, num: int) -> str | None:
        """Return what `num` rows, fewer than a batch has, are: `all` of a short batch, this rank's `own`, or None if neither."""
        if num == self.num_last:
            return "all"
        return "own" if not self.whole and num == len(self.rows) else None

    def start_at(self, num_batches: int) -> None:
        """Continue after `num_batches` batches of the whole run, past epochs included."""
        self.epoch, self._first = divmod(num_batches, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at `epoch`; without this call, each iteration is the next epoch."""
        self.epoch, self._first = epoch, 0
