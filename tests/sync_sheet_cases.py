"""Gradient coding over real ranks, some of which sleep, beside gradient descent with all chunks."""

from __future__ import annotations

import time

import torch

from tests.sync_problems import LeastSquares, Vector
from trainwright import sync
from trainwright.launch import rank, world_size

STEPS = 10


def decoded_where_some_sleep() -> float:
    """The largest difference of a parameter from descent with the whole gradient."""
    n = world_size() - 1
    problem, model = LeastSquares(n, 5, 9), Vector(torch.zeros(5).double())
    joined = sync.create(
        "gradient-coding", model, torch.optim.SGD(model.parameters(), lr=0.5), stragglers=2, cyclic=True, scale=n
    )

    def closure(chunk: int) -> torch.Tensor:
        x = torch.cat(list(model.parts))
        return x @ problem.hessians[chunk] @ x / 2 - problem.targets[chunk] @ x

    x = model.x
    for step in range(STEPS):
        if (rank() + step) % n < 2 and rank():
            time.sleep(0.05)
        joined.step(closure)
        x = x - 0.5 * torch.stack([problem.gradient(x, chunk, 0) for chunk in range(n)]).mean(0)
    joined.finish()
    return float((model.x - x).abs().max())
