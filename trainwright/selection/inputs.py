"""What selectors take, tensors or arrays, checked; and what they give back, of the same kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifacts import UserError

_SMALL = 4096


def as_features(X: Any) -> Tensor:
    """Return features [n, d] as a floating tensor; in fp64 where there are few, since near points cancel."""
    features = X.detach() if isinstance(X, Tensor) else _from_array(np.asarray(X))
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
    """Return for each class (of numbers or names) the places of its examples, classes in order."""
    if isinstance(y, Tensor):
        labels = y.flatten().to(features.device)
    else:
        given = np.asarray(y).reshape(-1)
        labels = torch.from_numpy(
            given.copy() if given.dtype.kind in "biuf" else np.unique(given, return_inverse=True)[1]
        )
        labels = labels.to(features.device)
    if labels.is_floating_point():
        raise UserError(
            f"a class for each example is needed, a number or a name; got labels of {labels.dtype}; convert class numbers to "
            "whole ones; for a regression leave y out: all examples are then one class"
        )
    if len(labels) != len(features):
        raise UserError(f"one label an example is needed; got {len(labels)} for {len(features)} examples; match them")
    return [(labels == label).nonzero().flatten() for label in labels.unique()]


def drawn_from(seed: int | torch.Generator) -> torch.Generator:
    """Return `seed` itself where it is a generator, else a new generator of that seed."""
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(int(seed))


def is_whole(value: Any) -> bool:
    """Whether a setting is a whole number, of Python's or NumPy's kind."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _from_array(array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise UserError(f"features of real numbers are needed; got {array.dtype}; convert them, or encode categories")
    return torch.from_numpy(array.copy())


def like(given: Any, found: Tensor) -> Any:
    """Return a result as what was given: a tensor for a tensor, else an array."""
    return found if isinstance(given, Tensor) else found.cpu().numpy()
