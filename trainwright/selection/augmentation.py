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


class AugmentedCoreset(Dataset[Any]):
    r"""All examples (or the coreset) under a weak transform, then the coreset again under a strong one: (x, y, weight).

    dataset: (x, y) by index, not transformed. indices, weights: the coreset's, as from `CRAIG(fraction, per_class="equal")`
    on `last_layer_gradients` of the examples without augmentation; a weight of 0 counts as 1, then all are scaled to mean 1.
    strong, weak: transforms of x. base: `full` (every example, weight 1) or `coreset` (with the weights). weigh_augmented:
    the strong copies carry the coreset's weights too; else 1, as in the authors' code.

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
        if base not in ("full", "coreset"):
            raise UserError(f"base full or coreset is needed; got {base!r}; take one of them")
        coreset = WeightedSubset(dataset, indices, _of_mean_one(weights))
        everything = WeightedSubset(dataset, range(len(dataset)), torch.ones(len(dataset)))
        self.weak, self.strong = weak, strong
        self.base = everything if base == "full" else coreset
        ones = torch.ones_like(coreset.weights)
        self.augmented = coreset if weigh_augmented else WeightedSubset(dataset, coreset.indices, ones)

    def __len__(self) -> int:
        return len(self.base) + len(self.augmented)

    def __getitem__(self, place: int) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(place)
        is_base = place < len(self.base)
        x, *rest = self.base[place] if is_base else self.augmented[place - len(self.base)]
        return (self.weak(x) if is_base else self.strong(x), *rest)


def _of_mean_one(weights: Any) -> Tensor:
    values = torch.as_tensor(weights).to(torch.get_default_dtype())
    values = torch.where(values == 0, 1.0, values)
    return values / values.mean() if len(values) else values
