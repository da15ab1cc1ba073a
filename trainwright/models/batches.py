"""Batches whose examples stand along the first dim: their size, the same batch with more or fewer, their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.trees import tensors_in


def shared_size(batch: Any) -> int | None:
    """Return the size of the first dim that all tensors of a batch share; None where they do not.

    A tensor without dims is left alone.

    >>> shared_size({"x": torch.ones(4, 2), "y": torch.ones(4)}), shared_size((torch.ones(4), torch.ones(3)))
    (4, None)
    """
    sizes = {int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def resized(batch: Any, num_examples: int) -> Any:
    """Return a batch of other tensors with `num_examples` in their first dim: the first ones, or all, repeated.

    >>> resized({"x": torch.tensor([1, 2, 3])}, 2)["x"], resized((torch.tensor([1, 2]),), 5)[0]
    (tensor([1, 2]), tensor([1, 2, 1, 2, 1]))
    """

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        times = -(-num_examples // max(1, tensor.shape[0]))
        return torch.cat([tensor] * times)[:num_examples] if times > 1 else tensor[:num_examples].clone()

    return mapped(batch, cut)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with `function` of its tensors in their places."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(item, function) for item in value])
    return value


def num_tokens(batch: Any) -> int | None:
    """Return the length of the batch's sequences, the second dim of its first tensor of token numbers; None without one.

    >>> num_tokens({"input_ids": torch.zeros(4, 128, dtype=torch.int64)}), num_tokens(torch.zeros(4, 3, 32, 32))
    (128, None)
    """
    tokens = (tensor for tensor in tensors_in(batch) if tensor.ndim == 2 and not tensor.is_floating_point())
    return next((int(tensor.shape[1]) for tensor in tokens), None)
