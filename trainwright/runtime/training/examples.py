"""Makes endless global batches of the plan's size from a dataset, the same on every rank, in the order of `ExampleOrder`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ...artifacts import BatchEntry, Plan, UserError
from ...rank.randomness import derived_seed
from ...torch_internals.private import flatten_batch
from ..batch import global_batch_size
from .order import ExampleOrder, SubsetOrder
from .padding import check_padding

WEIGHT = "weight"


class ExampleBatches:
    """Endless iterator over global batches made from `dataset`, from step `first_step` on.

    dataset: `len(dataset)` examples by index, each a dict or a tuple of the batch's entries without their first dim
    (an image and its label, say), as tensors, arrays or numbers. The batches are those of `plan.sampler(dataset)` with
    the same seed and `last`, epoch after epoch, until `use` selects other examples with weights w. If the plan's batch has one
    entry more than the examples, `weight` in a dict, the last in a tuple, that entry gets w [batch], and the loss has to apply
    it. Otherwise rows are sampled: of an epoch's m rows, example j gets m·w_j / Σw on average, so that a loss that is a mean
    over the batch has the weighted mean (Σ w_j f_j) / Σw as its expectation.
    strong: an augmentation, from example to example, for the examples that `use` marks; the generators of torch, NumPy and
    Python are seeded for each by (seed, step, row), so that all ranks and resumed runs get the same.

    Raises `UserError` if the dataset has no length, is empty or smaller than a batch, and if its examples (or what `strong`
    makes of them) do not fit the plan's batch.

    >>> import trainwright as tw
    >>> model, x, y = torch.nn.Bilinear(1, 1, 1), torch.arange(6.0)[:, None], torch.ones(6, 1)
    >>> plan = tw.plan(model, (x[:3], y[:3]), loss_fn=lambda output, batch: output.mean(), hardware="cpu:1")
    >>> batches = ExampleBatches(plan, torch.utils.data.TensorDataset(x, y))
    >>> sorted(float(value) for _ in range(2) for value in next(batches)[0])
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """

    def __init__(
        self, plan: Plan, dataset: Any, *, seed: int = 0, first_step: int = 0, last: str = "drop",
        strong: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.dataset, self.seed, self.step, self.strong = plan, dataset, seed, first_step, strong
        self.batch_size = global_batch_size(plan)
        self.num_examples = _length(dataset)
        self.has_weight = _check_example(plan, dataset[0], self.batch_size)
        if strong is not None:
            with seeded(0):
                _check_example(plan, strong(dataset[0]), self.batch_size)
        self.order = ExampleOrder(self.num_examples, self.batch_size, seed=seed, last=last)
        check_padding(last, dataset)
        self.since = 0
        padding = torch.arange(self.num_examples + 1)  # the place behind the last is the padding's
        self.indices, self.weights, self.is_strong = padding, (padding < self.num_examples).double(), padding < 0

    def use(self, indices: Tensor, weights: Tensor, is_strong: Tensor | None = None, since: int | None = None) -> None:
        """Make the batches from these examples, with epochs counted from step `since` (default: the next step).

        is_strong: marks the examples to be augmented by `strong`; an example may be listed twice, plain and augmented.
        """
        self.since = self.step if since is None else since
        self.indices, self.weights = indices.cpu().long(), weights.cpu().double()
        self.is_strong = torch.zeros(len(indices), dtype=torch.bool) if is_strong is None else is_strong.cpu().bool()
        drawn_by = None if self.has_weight else self.weights
        self.order = SubsetOrder(
            len(indices), self.batch_size, seed=self.seed, weights=drawn_by, since=self.since
        )  # fmt: skip

    def start_at(self, step: int) -> None:
        """Continue with the batch of `step`."""
        self.step = step

    @property
    def epoch(self) -> int:
        """Return the number of whole epochs since the current examples came into use."""
        return self.order.epoch_of(self.step)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        places = torch.tensor(self.order.batch(self.step))
        examples = [
            self._strong(index, row) if is_strong else self.dataset[index]
            for row, (index, is_strong) in enumerate(
                zip(self.indices[places].tolist(), self.is_strong[places].tolist())
            )
        ]
        self.step += 1
        return self._batch(examples, self.weights[places])

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the examples at `indices` as a batch, with weights of 1."""
        return self._batch([self.dataset[index] for index in indices], torch.ones(len(indices)))

    def _strong(self, index: int, row: int) -> Any:
        assert self.strong is not None
        with seeded(derived_seed(self.seed, self.step, row)):
            return self.strong(self.dataset[index])

    def _batch(self, examples: list[Any], weights: Tensor) -> Any:
        """Return the collated examples, with the weights if the plan's batch has an entry for them."""
        batch = default_collate(examples)
        if not isinstance(batch, dict):
            return (*batch, self._weight(str(len(batch)), weights)) if self.has_weight else tuple(batch)
        extra = {WEIGHT: self._weight(WEIGHT, weights)} if self.has_weight else {}
        return {**batch, **extra, **self.plan.literals}

    def _weight(self, name: str, weights: Tensor) -> Tensor:
        return weights.to(getattr(torch, self.plan.batch[name].dtype))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch (on the CPU), NumPy and Python while the context lasts, and restore them afterwards."""
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


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
    """Return whether the plan's batch has an entry for weights; raise `UserError` if the example does not fit the batch."""
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
    """Tell whether an entry of a batch can hold one weight for each example."""
    return entry.shape == (batch_size,) and getattr(torch, entry.dtype).is_floating_point
