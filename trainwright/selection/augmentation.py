"""Data-efficient augmentation: strong augmentation of a few examples that stand for the gradient of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..artifacts import UserError
from .weighted_subset import WeightedSubset

Transform = Callable[[Any], Any]


def with_strong_copies(
    num_examples: int, indices: Tensor, weights: Tensor, *, base: str = "full", weigh_augmented: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return what is trained on, as (indices, weights, whether strongly augmented) [m]: a base, then the coreset once more.

    indices, weights [k]: the coreset's; a weight of 0 counts as 1, then all are scaled to mean 1. base: `full` (all
    `num_examples`, weight 1; m = n + k) or `coreset` (with its weights; m = 2k). weigh_augmented: the strong copies carry the
    coreset's weights too; else 1, as in the authors' code. Raises `UserError` for an unknown base.

    >>> with_strong_copies(3, torch.tensor([2]), torch.tensor([3.0]))
    (tensor([0, 1, 2, 2]), tensor([1., 1., 1., 1.]), tensor([False, False, False,  True]))
    """
    if base not in ("full", "coreset"):
        raise UserError(f"base full or coreset is needed; got {base!r}; take one of them")
    own = _of_mean_one(weights)
    first, first_weights = (
        (torch.arange(num_examples), own.new_ones(num_examples)) if base == "full" else (indices, own)
    )
    second_weights = own if weigh_augmented else torch.ones_like(own)
    is_strong = torch.arange(len(first) + len(indices)) >= len(first)
    return torch.cat([first, indices]), torch.cat([first_weights, second_weights]), is_strong


class AugmentedCoreset(Dataset[Any]):
    r"""All examples (or the coreset) under a weak transform, then the coreset again under a strong one: (x, y, weight).

    dataset: (x, y) by index, not transformed, or dicts. indices, weights: the coreset's, as from
    `CRAIG(fraction, per_class="equal")` on `last_layer_gradients` of the examples without augmentation.
    strong, weak: transforms of x (of a dict: of the whole example). base, weigh_augmented: see `with_strong_copies`.

    Raises `UserError` as `WeightedSubset`, and for an unknown base. On small problems the test accuracy is not above
    that of random examples augmented as strongly; what is won there is the nearness to the gradient of augmenting everything.

    >>> data = [(1.0, 0), (2.0, 1), (3.0, 0)]
    >>> both = AugmentedCoreset(data, [2], [3.0], strong=lambda x: 10 * x)
    >>> [x for x, _, _ in both]
    [1.0, 2.0, 3.0, 30.0]

    Source: Liu & Mirzasoleiman 2022, Data-Efficient Augmentation for Training Neural Networks, NeurIPS (arXiv:2210.08363),
    and its code; chosen anew every few epochs by `Reselection(make_subset=…)`.
    """

    def __init__(
        self, dataset: Any, indices: Any, weights: Any, *, strong: Transform, weak: Transform = lambda x: x,
        base: str = "full", weigh_augmented: bool = False,
    ) -> None:  # fmt: skip
        chosen = WeightedSubset(dataset, indices, weights)
        places, values, self.is_strong = with_strong_copies(
            len(dataset), chosen.indices, chosen.weights, base=base, weigh_augmented=weigh_augmented
        )
        self.weak, self.strong = weak, strong
        self.examples = WeightedSubset(dataset, places, values)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: int) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(place)
        transform = self.strong if bool(self.is_strong[place]) else self.weak
        example = self.examples[place]
        if isinstance(example, dict):
            return transform(example)
        x, *rest = example
        return (transform(x), *rest)


def _of_mean_one(weights: Tensor) -> Tensor:
    values = torch.where(weights == 0, 1.0, weights)
    return values / values.mean() if len(values) else values
