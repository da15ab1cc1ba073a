"""Optimizers over sharded parameters, called on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainwright import optim

from . import CASES
from .case import Case, Problem, train, whole


def steps_on_shards(name: str) -> dict[str, float]:
    """The largest difference of a parameter or a state from the same on one rank, for every cut and variant."""
    case = CASES[name]
    return {
        f"{placement} {variant} {how}": _difference(case, placement, {**variant, **how})
        for placement in (Shard(0), Shard(1), Replicate())
        for variant, how in ((case.variants[0], {"foreach": True}), *((variant, {}) for variant in case.all_variants))
    }


def _difference(case: Case, placement: Any, options: dict[str, Any]) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, sharded = (Problem(case.sharded_shapes, seed=8) for _ in range(2))
    dims = [Shard(0) if isinstance(placement, Shard) and param.dim() < 2 else placement for param in alone.params]
    sharded.params = [
        nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [own], src_data_rank=None))
        for param, own in zip(alone.params, dims)
    ]
    sharded.curvature = [
        distribute_tensor(curvature, mesh, [own], src_data_rank=None) for curvature, own in zip(sharded.curvature, dims)
    ]
    sharded.slopes = [
        distribute_tensor(slope, mesh, [own], src_data_rank=None) for slope, own in zip(sharded.slopes, dims)
    ]
    optimizers = [
        optim.create(case.name, problem.params, **{**case.settings, **options}) for problem in (alone, sharded)
    ]
    results = [train(case, problem, optimizer, 4) for problem, optimizer in zip((alone, sharded), optimizers)]
    worst = max(float((own - other).abs().max()) for own, other in zip(*results, strict=True))
    for own, other in zip(alone.params, sharded.params):
        for key, value in optimizers[0].state[own].items():
            found = optimizers[1].state[other][key]
            if torch.is_tensor(value):
                pair = [whole(found).double(), value.double()]
                if key in case.unordered:
                    pair = [tensor.flatten().sort().values for tensor in pair]
                worst = max(worst, float((pair[0] - pair[1]).abs().max()))
    return worst
