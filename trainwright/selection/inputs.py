"""What selectors take, tensors or arrays, checked; and what they give back, of the same kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError

_SMALL = 4096


def as_features(X: Any) -> Tensor:
    """Return features [n, d] as a floating tensor; in fp64 where there are few, since near points cancel."""
    features = torch.as_tensor(X)
    if features.dim() == 1:
        features = features[:, None]
    if features.dim() != 2 or len(features) == 0 or features.shape[1] == 0:
        raise UserError(
            f"features of shape [n, d] are needed; got {list(features.shape)}; flatten each example to a row"
        )
    if not features.is_floating_point():
        features = features.to(torch.get_default_dtype())
    if not bool(features.isfinite().all()):
        raise UserError(
            "finite features are needed; got NaN or infinity; clean the features, or lower the learning rate"
        )
    return features.double() if len(features) <= _SMALL else features


def as_labels(y: Any, features: Tensor) -> list[Tensor]:
    """Return for each class the places of its examples, classes in order."""
    labels = torch.as_tensor(y).flatten().to(features.device)
    if len(labels) != len(features):
        raise UserError(f"one label an example is needed; got {len(labels)} for {len(features)} examples; match them")
    return [(labels == label).nonzero().flatten() for label in labels.unique()]


def like(given: Any, found: Tensor) -> Any:
    """Return a result as what was given: a tensor for a tensor, else an array."""
    return found if isinstance(given, Tensor) else found.cpu().numpy()
