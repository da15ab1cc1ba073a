"""Sums over whole parameters of which each rank holds a shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def sum_over_shards(parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return Σ over parameters and ranks of (what a rank found on its shard, that parameter): one message a mesh.

    The found tensors have one shape. A rank's copy of what is replicated counts once; the sum is on the first's device.

    >>> import torch
    >>> sum_over_shards([(torch.ones(2), torch.empty(5)), (torch.ones(2), torch.empty(3))]).tolist()
    [2.0, 2.0]
    """
    alike: dict[Any, tuple[Tensor, Tensor]] = {}
    for found, param in parts:
        key = (param.device_mesh, param.placements) if isinstance(param, DTensor) else param.device
        alike[key] = (alike[key][0] + found, param) if key in alike else (found, param)
    sums = [_over_ranks(found, param) for found, param in alike.values()]
    total = sums[0].clone()
    for part in sums[1:]:
        total += part.to(total.device)
    return total


def _over_ranks(found: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return found
    places = [Partial() if isinstance(place, Shard) else Replicate() for place in param.placements]
    return DTensor.from_local(found, param.device_mesh, places).full_tensor()
