"""Problems whose parameters are one vector and whose gradients are a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import sync
from trainwright.sync import Simulation, Steps, Sync, simulate

Gradient = Callable[[Tensor, int, int], Tensor]
"""A loss as a function of (x, rank, step)."""
Loss = Callable[[Tensor, int, int], float]


class Vector(nn.Module):
    """One vector of parameters, or one cut into several."""

    def __init__(self, x: Tensor, cuts: Sequence[int] = ()) -> None:
        super().__init__()
        self.parts = nn.ParameterList([part.clone() for part in x.split(list(cuts) or [x.numel()])])

    @property
    def x(self) -> Tensor:
        return torch.cat([part.detach() for part in self.parts])

    def set_gradient(self, gradient: Tensor) -> None:
        for part, own in zip(self.parts, gradient.split([part.numel() for part in self.parts])):
            part.grad = own.clone()


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def worker(
    name: str, start: Tensor, gradient: Gradient, num_steps: int, make: Callable[[Any], torch.optim.Optimizer],
    loss: Loss | None = None, starts: Sequence[Tensor] | None = None, cuts: Sequence[int] = (),
    watch: Callable[[Sync, int], None] | None = None, **options: Any,
) -> Steps[Sync]:  # fmt: skip
    """starts: where each worker really begins, once all have joined from `start`."""
    model = Vector(start, cuts)
    joined = yield from sync.join(name, model, make(model.parameters()), **options)
    rank = joined.method.worker.rank
    if starts is not None:
        joined.method.replica.write(starts[rank])
    for step in range(num_steps):
        x = model.x
        model.set_gradient(gradient(x, rank, step))
        yield from joined.steps(loss(x, rank, step) if loss is not None else 0.0)
        if watch is not None:
            watch(joined, step)
    return joined


def run(name: str, num_workers: int, *arguments: Any, **keywords: Any) -> Simulation[Sync]:
    return simulate([worker(name, *arguments, **keywords) for _ in range(num_workers)])


def ends(done: Simulation[Sync]) -> Tensor:
    """Every worker's parameters, [n, d]."""
    return torch.stack([each.method.replica.read() for each in done.results])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class LeastSquares:
    """Node i has ½ scale ‖A_i x − b_i‖² / rows, with an optimum of its own."""

    def __init__(self, num_nodes: int, dim: int, num_rows: int, seed: int = 0, scale: float = 1.0) -> None:
        self.a = normal(num_nodes, num_rows, dim, seed=seed)
        own = normal(num_nodes, dim, 1, seed=seed + 1)
        self.hessians = scale * self.a.mT @ self.a / num_rows
        self.targets = (self.hessians @ own)[..., 0]

    def gradient(self, x: Tensor, rank: int, step: int) -> Tensor:
        return self.hessians[rank] @ x - self.targets[rank]

    @property
    def minimum(self) -> Tensor:
        return torch.linalg.solve(self.hessians.sum(0), self.targets.sum(0))
