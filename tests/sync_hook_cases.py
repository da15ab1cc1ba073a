"""torch's DistributedDataParallel with its own hooks, on the ranks of a pool, beside the methods that call those hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from trainwright import sync
from trainwright.launch import rank, world_size

STEPS = 9


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def loss_of(model: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank() + step)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    return (model(x) - x[:, :2].sin()).square().mean()


def farthest(name: str, options: dict[str, Any]) -> float:
    """The largest difference of a parameter, in any step, between a method and DistributedDataParallel with its hook."""
    ours, theirs = net(), net()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (ours, theirs)]
    joined = sync.create(name, ours, optimizers[0], **options)
    wrapped = nn.parallel.DistributedDataParallel(theirs, bucket_cap_mb=100)
    averager = _hooked(wrapped, name, options)
    most = 0.0
    for step in range(STEPS):
        for model, optimizer in zip((ours, wrapped), optimizers):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            if model is ours:
                joined.step(loss)
            else:
                optimizer.step()
                if averager is not None:
                    averager.average_parameters(theirs.parameters())
        most = max(most, *(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters())))
    joined.close()
    return most


def _hooked(wrapped: Any, name: str, options: dict[str, Any]) -> Any:
    if name == "powersgd":
        state = PowerSGDState(
            None, matrix_approximation_rank=options["rank"], start_powerSGD_iter=options["start_step"],
            orthogonalization_epsilon=1e-8, warm_start=options["warm_start"],
        )  # fmt: skip
        wrapped.register_comm_hook(state, powerSGD_hook)
        return None
    size, shared = options["subgroup"], options["shared_steps"]
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size(), size)]
    own = PostLocalSGDState(None, groups[rank() // size], shared, post_local_gradient_allreduce=size > 1)
    wrapped.register_comm_hook(own, post_localSGD_hook)
    return PeriodicModelAverager(options["period"], shared)
