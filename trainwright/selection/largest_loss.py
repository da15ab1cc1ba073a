"""The examples of the largest loss: a baseline that looks hard examples up, and mislabelled ones with them."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..artifacts import Estimator, UserError, check_range
from .inputs import as_features, as_labels, is_whole, like
from .sizes import class_sizes


class LargestLoss(Estimator):
    r"""Choose the examples of the largest cross-entropy, each of weight 1: a baseline of `CRAIG`, with its settings for the sizes.

    `fit(X, y)` takes what `Reselection` and `train --select` hand to a selector, the gradients at the logits, softmax - one-hot
    [n, C], and class numbers y [n]: the loss of an example of class y is -log(1 + X[y]). Or losses themselves, X [n], with labels y
    or none. It sets `indices_` [k] (class by class, the largest first) and `weights_` [k].

    fraction, budget, per_class: as in `CRAIG`; without labels all examples are one class. Ties go to the earlier example. Raises
    `UserError` for settings out of range, labels that are no class of the gradients, and rows that are no such gradients.

    The gradient of what it chooses does not stand for that of all: it is biased to what is hard, outliers and wrong
    labels first. Not for noisy labels.

    >>> LargestLoss(budget=2).fit(torch.tensor([0.1, 3.0, 0.2, 1.5])).indices_.tolist()
    [1, 3]
    """

    indices_: Any
    weights_: Any

    def __init__(
        self, fraction: float = 0.1, *, budget: int | None = None, per_class: str = "proportional"
    ) -> None:  # fmt: skip
        check_range(
            "LargestLoss",
            fraction=(fraction, "in (0, 1]", lambda value: 0.0 < value <= 1.0),
            budget=(budget, "whole, of at least 1", lambda value: value is None or (is_whole(value) and value >= 1)),
            per_class=(per_class, "proportional or equal", lambda value: value in ("proportional", "equal")),
        )
        self.fraction, self.budget, self.per_class = fraction, budget, per_class

    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose among the rows of X, class by class where labels y [n] are given."""
        rows = as_features(X)
        classes = [torch.arange(len(rows), device=rows.device)] if y is None else as_labels(y, rows)
        losses = rows[:, 0] if rows.shape[1] == 1 else _losses(rows, y)
        sizes = class_sizes([len(places) for places in classes], self.fraction, self.budget, self.per_class)
        chosen = [
            places[losses[places].sort(descending=True, stable=True).indices[:size]]
            for places, size in zip(classes, sizes)
        ]
        indices = torch.cat(chosen)
        self.indices_ = like(X, indices)
        self.weights_ = like(X, torch.ones(len(indices), device=rows.device))
        return self


def _losses(gradients: Tensor, y: Any) -> Tensor:
    """Return -log softmax at the label [n], from softmax - one-hot [n, C]."""
    labels = torch.as_tensor(y, device=gradients.device).flatten() if y is not None else None
    num_classes = gradients.shape[1]
    if labels is None or labels.dtype == torch.bool or int(labels.min()) < 0 or int(labels.max()) >= num_classes:
        found = "none" if labels is None else f"{labels.dtype} from {int(labels.min())} to {int(labels.max())}"
        raise UserError(
            f"class numbers from 0 to {num_classes - 1} are needed for gradients of {num_classes} classes; got {found}; give "
            "y, or the losses themselves, [n]"
        )
    own = gradients[torch.arange(len(gradients), device=gradients.device), labels.long()]
    if not bool(((own >= -1 - 1e-6) & (own <= 1e-6)).all()):
        raise UserError(
            "gradients at the logits, softmax - one-hot, are needed; got rows that are not; take logit_gradients, or give "
            "the losses themselves, [n]"
        )
    return -torch.log((1 + own).clamp_min(torch.finfo(own.dtype).tiny))
