"""What the estimators take, tensors or arrays, as float64 tensors; and what they give back, of the same kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError


def as_examples(X: Any, intercept: bool) -> Tensor:
    """Return X (n, d) in float64, with a column of ones where there is an intercept."""
    examples = _numbers(X, "X")
    if examples.dim() != 2 or len(examples) == 0 or examples.shape[1] == 0:
        raise UserError(f"X of shape [n, d] is needed; got {list(examples.shape)}; a row for each example")
    if not bool(examples.isfinite().all()):
        raise UserError("a finite X is needed; got NaN or infinity; clean it")
    return torch.cat([examples, torch.ones_like(examples[:, :1])], 1) if intercept else examples


def as_numbers(y: Any) -> Tensor:
    """Return y (n) in float64."""
    return _numbers(y, "y").flatten()


def _numbers(values: Any, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().to(torch.float64)
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name} of real numbers is needed; got {array.dtype}; convert it, or encode its categories")
    return torch.from_numpy(np.array(array, dtype=np.float64))


def as_classes(y: Any) -> tuple[Any, Tensor]:
    """Return the two labels in order, and -1 or 1 for each example."""
    classes = torch.unique(y) if isinstance(y, Tensor) else np.unique(np.asarray(y))
    if len(classes) != 2:
        raise UserError(f"labels of two classes are needed; got {len(classes)}; fit one class against the rest")
    second = y == classes[1] if isinstance(y, Tensor) else torch.as_tensor(np.asarray(y) == classes[1])
    return classes, 2.0 * second.flatten().double() - 1.0


def as_tensor(values: Any) -> Tensor:
    """Return a tensor as it is, an array or a list as a tensor of its dtype."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def same_labels(found: Any, wanted: Any) -> float:
    """Return the share of labels, numbers or names, that agree."""
    pair = [label.cpu().numpy() if isinstance(label, Tensor) else np.asarray(label) for label in (found, wanted)]
    return float(np.mean(pair[0] == pair[1].reshape(-1)))


def like(given: Any, found: Tensor) -> Any:
    """Return a result as what was given: a tensor for a tensor, else an array; of its dtype where both are floating."""
    if isinstance(given, Tensor):
        return found.to(given.dtype) if given.is_floating_point() and found.is_floating_point() else found
    array, kind = found.cpu().numpy(), getattr(given, "dtype", None)
    return array.astype(kind) if kind is not None and kind.kind == "f" and found.is_floating_point() else array
