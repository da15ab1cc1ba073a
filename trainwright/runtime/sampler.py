"""Which examples each rank loads: `plan.sampler` for a `DataLoader`, and padding for a last batch that is too short.

A plan fixes the global batch; of it a rank needs the rows that its part of the batch's first dim covers. Which examples
stand in a batch follows from (seed, number of the batch) alone, so that a run which goes on at some batch sees what an
uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..artifacts import Plan, UserError
from ..capture.randomness import derived_seed
from .batch import coordinates, global_batch_size, own_rows

IGNORED = -100
"""The label that cross-entropy leaves out: torch's default, and Hugging Face's."""
LAST = ("drop", "pad")


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
        if last not in LAST:
            raise UserError(
                f"what to do with a last, short batch is one of {', '.join(LAST)}; got {last!r}; choose one"
            )
        if last == "pad" and not isinstance(dataset, PaddedDataset):
            raise UserError(
                "a dataset with padding is needed for last='pad', or the loss would count examples twice; got "
                f"{type(dataset).__name__}; wrap it as plan.padded(dataset), or take last='drop'"
            )
        mesh = tuple(plan.mesh.values())
        self.batch_size = global_batch_size(plan)
        self.rows = own_rows(plan, tuple(coords) if coords is not None else coordinates(mesh))
        self.num_examples, self.shuffle, self.seed = len(dataset), shuffle, seed
        short = self.num_examples % self.batch_size
        self._num_padding = self.batch_size - short if last == "pad" and short else 0
        self._num_batches = (self.num_examples + self._num_padding) // self.batch_size
        self.epoch = self._first = 0
        self._check()

    def _check(self) -> None:
        if self._num_batches == 0:
            raise UserError(
                f"at least {self.batch_size} examples are needed for a batch of this plan; the dataset has "
                f"{self.num_examples}; pad it (plan.padded and last='pad'), or plan for a smaller batch"
            )
        if not self.rows:
            raise UserError(
                f"a row for every rank is needed; a batch of {self.batch_size} leaves this rank none; plan for a larger "
                "batch, or load the global batch and call plan.shard_batch"
            )

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self.epoch, self._first
        self.epoch, self._first = epoch + 1, 0
        order = self._order(epoch)
        for start in range(first * self.batch_size, self._num_batches * self.batch_size, self.batch_size):
            yield [order[start + row] for row in self.rows]

    def __len__(self) -> int:
        return self._num_batches

    def start_at(self, num_batches: int) -> None:
        """Go on after so many batches of the whole run, past epochs included."""
        self.epoch, self._first = divmod(num_batches, self._num_batches)

    def set_epoch(self, epoch: int) -> None:
        """Begin with `epoch` at the next iteration; without this, each iteration is the next epoch."""
        self.epoch, self._first = epoch, 0

    def _order(self, epoch: int) -> list[int]:
        padding = [self.num_examples] * self._num_padding
        if not self.shuffle:
            return [*range(self.num_examples), *padding]
        generator = torch.Generator().manual_seed(derived_seed(self.seed, f"epoch {epoch}"))
        return torch.randperm(self.num_examples, generator=generator).tolist() + padding


class PaddedDataset(Dataset[Any]):
    """A dataset with one example more, behind the last, whose labels cross-entropy leaves out.

    A mean over the labels that count is then the same as without it. Each example has to be a dict with integer `labels`;
    the plan's loss has to be a cross-entropy that ignores −100, torch's default, and its model may not mix the examples of a
    batch in other ways (batch norm is refused; a router's balancing loss would count the padding).

    Raises `UserError` where padding would change the loss.
    """

    def __init__(self, plan: Plan, dataset: Any) -> None:
        self._dataset = dataset
        example = dataset[0]
        labels = example.get("labels") if isinstance(example, dict) else None
        integer = labels is not None and not torch.as_tensor(labels).is_floating_point()
        remedy = "drop the last batch (last='drop'), or choose a batch size that divides the dataset"
        if not integer or not any(":cross_entropy" in key for key in plan.modules):
            raise UserError(
                "integer `labels` and a cross-entropy that leaves some out are needed to pad without changing the loss; "
                f"this {'batch' if not integer else 'model'} has none; {remedy}"
            )
        if any(":batch_norm" in key for key in plan.modules):
            raise UserError(
                "a model that treats each example by itself is needed to pad without changing the loss; this one has batch "
                f"norm; {remedy}"
            )

    def __len__(self) -> int:
        """How many real examples there are."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index != len(self._dataset):
            return self._dataset[index]
        example = dict(self._dataset[0])
        labels = example["labels"]
        example["labels"] = torch.full_like(labels, IGNORED) if isinstance(labels, Tensor) else _ignored(labels)
        return example


def _ignored(labels: Any) -> Any:
    return [_ignored(each) for each in labels] if isinstance(labels, list | tuple) else IGNORED
