"""Norms of many tensors taken as one vector, whole or sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .shards import sum_over_shards


def total_norm(tensors: Sequence[Tensor], order: int = 2) -> Tensor:
    """Return the ℓ2 or ℓ1 norm of all tensors together as a real number without dimensions, in fp32 at least.

    Of sharded tensors (`DTensor`) it is the norm of the whole; every rank must call it, and gets the same. One
    all-reduce serves all tensors that are sharded alike. Raises `ValueError` for no tensors.

    tensors: of any shapes, dtypes and devices; the result is on the first one's.
    order: 1 or 2.

    >>> total_norm([torch.ones(2, 2), torch.ones(5)])
    tensor(3.)
    >>> total_norm([torch.ones(2, 2), -torch.ones(5)], 1)
    tensor(9.)
    """
    if not tensors:
        raise ValueError("total_norm needs at least one tensor; got none; leave the norm out")
    whole = [_summed(tensor) for tensor in tensors]
    return sum_over_shards((_power_sum(_local(tensor), order), tensor) for tensor in whole) ** (1 / order)


def _summed(tensor: Tensor) -> Tensor:
    """The tensor without partial sums."""
    if not isinstance(tensor, DTensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if at.is_partial() else at for at in tensor.placements])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _power_sum(tensor: Tensor, order: int) -> Tensor:
    """Return Σ|x|^order over all elements, in fp32 at least."""
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return torch.linalg.vector_norm(tensor, order, dtype=torch.float32 if narrow else None) ** order
