"""`WeightedSubset`: some examples of a dataset, each with its weight, for a DataLoader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..artifacts import UserError


class WeightedSubset(Dataset[Any]):
    """Examples `indices` of `dataset`, each returned with its weight: `(x, y)` as `(x, y, weight)`.

    Train with the weighted loss `(weight * loss(out, y)).sum() / weight.sum()`, losses not reduced. An example that is a
    dict gets the key `weight`; any other that is no tuple becomes `(example, weight)`. Raises `UserError` for indices
    outside the dataset or weights that do not match, are negative or not finite.

    >>> data = [("a", 0), ("b", 1), ("c", 0)]
    >>> WeightedSubset(data, [2, 0], [1.0, 2.0])[1]
    ('a', 0, tensor(2.))
    """

    def __init__(self, dataset: Any, indices: Sequence[int] | Tensor, weights: Sequence[float] | Tensor) -> None:
        places, values = torch.as_tensor(indices).long(), torch.as_tensor(weights).to(torch.get_default_dtype())
        if places.dim() != 1 or places.shape != values.shape:
            raise UserError(
                f"one weight an index is needed; got indices of shape {list(places.shape)} and weights of "
                f"{list(values.shape)}; give what a selector's indices_ and weights_ are"
            )
        if len(places) and not (int(places.min()) >= 0 and int(places.max()) < len(dataset)):
            raise UserError(
                f"indices from 0 to {len(dataset) - 1} are needed; got {int(places.min())} to {int(places.max())}; "
                "select from the same dataset"
            )
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise UserError("weights of at least 0 are needed; got a negative or infinite one; check the selector")
        self.dataset, self.indices, self.weights = dataset, places, values

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Any:
        example, weight = self.dataset[int(self.indices[place])], self.weights[place]
        if isinstance(example, dict):
            return {**example, "weight": weight}
        return (*example, weight) if isinstance(example, tuple) else (example, weight)
