"""`Reselection`: a loader of weighted batches whose subset is chosen anew every few epochs, by the model's gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..artifacts import check_range
from .gradients import last_layer_gradients
from .inputs import drawn_from
from .weighted_subset import WeightedSubset


class Selector(Protocol):
    """What chooses: `CRAIG`, or anything with its `fit`, `indices_` and `weights_`."""

    indices_: Any
    weights_: Any

    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose among the rows of X."""


class Reselection:
    r"""Iterate over weighted batches of a subset; each iteration is one epoch.

    Before epochs `warm_up`, `warm_up` + `every`, … the gradients of all examples are made (`last_layer_gradients`, one
    pass in eval mode) and `selector` chooses among them by class; epochs before `warm_up` run over all examples with weight 1.
    dataset: (x, y) by index; model: x to logits; selector: a `CRAIG`, with `normalise=True` for weights of mean 1.
    last_layer: for gradients times the embedding. make_subset: (dataset, indices, weights) to a dataset, `WeightedSubset`
    by default (see `AugmentedCoreset`). seed: of the shuffling; `num_workers` of the loaders.

    `indices_`, `weights_`: of the last choice. `selection_s`: seconds spent on choosing so far, passes over the data
    included; `num_selections`. Train with (weight · loss).sum() / weight.sum().

    Raises `UserError` for numbers out of range; the rest as `last_layer_gradients`. Not worth it where a forward pass over
    all examples costs about what training on them does: that is a third of an epoch each time.

    >>> from trainwright.selection import CRAIG
    >>> data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None], torch.arange(8) % 2)
    >>> batches = Reselection(data, nn.Linear(1, 2), CRAIG(0.5), every=2, batch_size=2)
    >>> [len(list(batches)) for _ in range(3)], batches.num_selections
    ([2, 2, 2], 2)

    Source: the training loop of Mirzasoleiman, Bilmes & Leskovec 2020 (arXiv:1906.01827).
    """

    indices_: Tensor
    weights_: Tensor

    def __init__(
        self, dataset: Any, model: nn.Module, selector: Selector, *, every: int = 1, batch_size: int = 32,
        warm_up: int = 0, last_layer: nn.Module | None = None,
        make_subset: Callable[[Any, Tensor, Tensor], Any] = WeightedSubset, seed: int | torch.Generator = 0, num_workers: int = 0,
    ) -> None:  # fmt: skip
        at_least_1 = ("of at least 1", lambda value: value >= 1)
        check_range(
            "Reselection",
            every=(every, *at_least_1),
            batch_size=(batch_size, *at_least_1),
            warm_up=(warm_up, "of at least 0", lambda value: value >= 0),
        )
        self.dataset, self.model, self.selector, self.make_subset = dataset, model, selector, make_subset
        self.every, self.batch_size, self.warm_up = every, batch_size, warm_up
        self.last_layer, self.num_workers = last_layer, num_workers
        self.selection_s, self.num_selections, self.epoch = 0.0, 0, 0
        self._generator = drawn_from(seed)
        self._subset: Any = WeightedSubset(dataset, range(len(dataset)), torch.ones(len(dataset)))

    def __iter__(self) -> Iterator[Any]:
        """Yield one epoch's batches; a new choice is made first where one is due."""
        if self.epoch >= self.warm_up and (self.epoch - self.warm_up) % self.every == 0:
            self.select()
        self.epoch += 1
        return iter(DataLoader(self._subset, self.batch_size, shuffle=True, generator=self._generator,
                               num_workers=self.num_workers))  # fmt: skip

    def select(self) -> None:
        """Choose now, whatever the epoch."""
        started = time.perf_counter()
        # A loader draws a seed even without shuffling: from a generator, so that the global state stays as it is.
        batches = DataLoader(
            self.dataset, max(self.batch_size, 256), num_workers=self.num_workers, generator=torch.Generator()
        )
        gradients, labels = last_layer_gradients(self.model, batches, last_layer=self.last_layer)
        chosen = self.selector.fit(gradients, labels)
        self.indices_, self.weights_ = torch.as_tensor(chosen.indices_), torch.as_tensor(chosen.weights_)
        self._subset = self.make_subset(self.dataset, self.indices_, self.weights_)
        self.num_selections += 1
        self.selection_s += time.perf_counter() - started
