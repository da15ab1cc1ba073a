"""Batches of the plan's size from a dataset of examples: for ever, shuffled each epoch, the same on every rank.

Which examples stand in the batch of a step follows from (seed, step) alone, so a run that goes on at a step sees what an
uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..artifacts import BatchEntry, Plan, UserError
from ..capture._torch_private import flatten_batch
from .batch import global_batch_size

WEIGHT = "weight"


class ExampleBatches:
    """Iterate over global batches made from `dataset`, from step `first_step` on; it never ends.

    dataset: `len(dataset)` examples by index, each a dict or a tuple of the batch's entries without their first dim
    (an image and its label, say), as tensors, arrays or numbers. All are used, each epoch in another order, until `use`
    says which, and with what weights w. Where the plan's batch has one entry more than the examples, `weight` in a dict, the
    last in a tuple, it gets w [batch], and the loss is to weigh by it. Else the batch is drawn: in an epoch of k examples,
    example j stands k·w_j / Σw times on average (systematic sampling), so that a loss that is a mean over the batch has
    the weighted mean (Σ w_j f_j) / Σw as its expectation.

    Raises `UserError` where the dataset is empty or no dataset, or where its examples do not fit the plan's batch.

    >>> import trainwright as tw
    >>> model, x, y = torch.nn.Bilinear(1, 1, 1), torch.arange(6.0)[:, None], torch.ones(6, 1)
    >>> plan = tw.plan(model, (x[:3], y[:3]), loss_fn=lambda output, batch: output.mean(), hardware="cpu:1")
    >>> batches = ExampleBatches(plan, torch.utils.data.TensorDataset(x, y))
    >>> sorted(float(value) for _ in range(2) for value in next(batches)[0])
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    Source of the sampling: Madow 1944, On the Theory of Systematic Sampling.
    """

    def __init__(self, plan: Plan, dataset: Any, *, seed: int = 0, first_step: int = 0) -> None:
        self.plan, self.dataset, self.seed, self.step = plan, dataset, seed, first_step
        self.batch_size = global_batch_size(plan)
        self.num_examples = _length(dataset)
        self.has_weight = _check_example(plan, dataset[0], self.batch_size)
        self._orders: dict[int, np.ndarray] = {}
        self.use(torch.arange(self.num_examples), torch.ones(self.num_examples), since=0)

    def use(self, indices: Tensor, weights: Tensor, since: int | None = None) -> None:
        """Take the batches from these examples, counting epochs from step `since` (default: the step to come)."""
        self.since = self.step if since is None else since
        self.indices, self.weights = indices.cpu().long(), weights.cpu().double()
        self._orders.clear()

    def start_at(self, step: int) -> None:
        """Go on with the batch of `step`."""
        self.step = step

    @property
    def epoch(self) -> float:
        """How often the examples in use have been gone through since they came into use."""
        return (self.step - self.since) * self.batch_size / len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        places = self._places()
        self.step += 1
        return self.batch(self.indices[places].tolist(), self.weights[places])

    def batch(self, indices: Sequence[int], weights: Tensor) -> Any:
        """Return these examples as a batch; the weights stand in it where the plan's batch has room for them."""
        batch = default_collate([self.dataset[index] for index in indices])
        if not isinstance(batch, dict):
            return (*batch, self._weight(str(len(batch)), weights)) if self.has_weight else tuple(batch)
        extra = {WEIGHT: self._weight(WEIGHT, weights)} if self.has_weight else {}
        return {**batch, **extra, **self.plan.literals}

    def _weight(self, name: str, weights: Tensor) -> Tensor:
        return weights.to(getattr(torch, self.plan.batch[name].dtype))

    def _places(self) -> np.ndarray:
        """Where the batch of this step stands in `indices`: the next ones of the epochs' orders, end to end."""
        size = len(self.indices)
        start = (self.step - self.since) * self.batch_size
        first, last = start // size, (start + self.batch_size - 1) // size
        known, epochs = self._orders, range(first, last + 1)
        self._orders = {epoch: known[epoch] if epoch in known else self._order(epoch) for epoch in epochs}
        stream = np.concatenate(list(self._orders.values()))
        return stream[start - first * size :][: self.batch_size]

    def _order(self, epoch: int) -> np.ndarray:
        """The places in `indices` in the order of an epoch."""
        random = np.random.default_rng([self.seed, self.since, epoch])
        size = len(self.indices)
        if self.has_weight:
            return random.permutation(size)
        edges = self.weights.numpy().cumsum()
        points = (random.random() + np.arange(size)) / size * edges[-1]
        return random.permutation(np.searchsorted(edges, points, side="right").clip(max=size - 1))


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"a dataset with len() and examples by index is needed; got {type(dataset).__name__}; "
            "give a torch.utils.data.Dataset, or an iterable of batches as `data`"
        )
    if len(dataset) == 0:
        raise UserError("a dataset of at least one example is needed; got an empty one; give examples")
    return len(dataset)


def _check_example(plan: Plan, example: Any, batch_size: int) -> bool:
    """Return whether the plan's batch has a weight beside what the example has; `UserError` where they do not fit."""
    if not isinstance(example, dict | tuple):
        raise UserError(f"examples as dicts or tuples are needed; the dataset has {type(example).__name__}; wrap them")
    try:
        alone = default_collate([example])
    except TypeError as error:
        raise UserError(f"examples of tensors, arrays or numbers are needed; {error}; convert them") from None
    named = {name: leaf for name, leaf in flatten_batch(alone)[0] if isinstance(leaf, Tensor)}
    weight = WEIGHT if isinstance(example, dict) else str(len(example))
    room = plan.batch.get(weight)
    has_weight = weight not in named and room is not None and _is_weight(room, batch_size)
    wanted = {name: entry for name, entry in plan.batch.items() if not (has_weight and name == weight)}
    if named.keys() != wanted.keys():
        raise UserError(
            f"examples with the entries of the batch, {', '.join(wanted)}, are needed; the dataset's have "
            f"{', '.join(named)}; return those"
        )
    for name, leaf in named.items():
        entry, dtype = wanted[name], str(leaf.dtype).removeprefix("torch.")
        if entry.shape != (batch_size, *leaf.shape[1:]) or entry.dtype != dtype:
            raise UserError(
                f"examples whose {name} has shape {list(entry.shape[1:])} and type {entry.dtype} are needed for this "
                f"plan; the dataset's has {list(leaf.shape[1:])} and {dtype}; convert it, or plan for it"
            )
    return has_weight


def _is_weight(entry: BatchEntry, batch_size: int) -> bool:
    """Return whether an entry of a batch can be one weight an example."""
    return entry.shape == (batch_size,) and getattr(torch, entry.dtype).is_floating_point
