"""Unsupervised training of a direction network: the residual that one exact line search along its output leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...artifacts import UserError, check_range
from ..driver import Callback, Counts, Limits, Measured, drive
from ..outcome import Result
from ..seeds import as_generator
from .direction_net import DirectionNet
from .grid import Family


def train_direction_net(
    net: DirectionNet, families: Sequence[Family], *, max_iterations: int = 600, batch_size: int = 10,
    learning_rate: float = 2e-3, max_evaluations: int | None = None, max_seconds: float | None = None,
    seed: int | torch.Generator = 0, callback: Callback | None = None, keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Result:  # fmt: skip
    """Train `net` in place to give directions for the operators of `families` (drawn from in turn).

    For unit right-hand sides b, with q = net(b), the loss is ‖b − A q (q·b)/(q·Aq)‖²: what one step along q leaves of the
    squared residual. Adam, the learning rate falling to zero along a cosine; gradients are clipped at norm one. The result's
    `x` is the network, `fun` the mean loss of the last tenth of the steps; `nfev` counts right-hand sides.

    It pays where many systems of one kind are to be solved. Train on small grids: with weights shared over the levels the
    network serves larger ones. Where those have odd sides (halved on the way down, too), give it odd sides beside even ones
    and more steps: pooling rounds an odd side up, and a network that never met such a level needs twice the iterations, or
    stalls. Not for one system: training costs some hundred
    solutions.

    >>> from trainwright.solvers.linear import PoissonGrid
    >>> net = DirectionNet(1, channels=4)
    >>> grids = [PoissonGrid((8,))]
    >>> train_direction_net(net, grids, max_iterations=80, learning_rate=0.01).fun < 0.5
    True

    Source: Kaneda et al., *A Deep Conjugate Direction Method for Iteratively Solving Linear Systems*, ICML 2023.
    Departures: weights shared over the levels, exact eigenvectors where the family knows them, a schedule and clipping.
    """
    if not families:
        raise UserError("at least one family of systems is needed; got none; try [PoissonGrid((32, 32))]")
    check_range(
        "train_direction_net",
        batch_size=(batch_size, "of at least 1", lambda value: value >= 1),
        learning_rate=(learning_rate, "above 0", lambda value: value > 0),
    )
    for family in families:
        if len(family.shape) != net.num_dims:
            raise UserError(
                f"grids of {net.num_dims} dimensions are needed for this network; got {family.shape}; make "
                f"DirectionNet({len(family.shape)})"
            )
    generator = as_generator(seed)
    optimizer = torch.optim.Adam(net.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(max_iterations, 1))
    losses: list[float] = []
    counts = Counts()

    def step(number: int) -> int:
        family = families[number % len(families)]
        loss = direction_loss(net, family, family.sample(batch_size, generator)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        counts.add(nfev=batch_size)
        losses.append(loss.item())
        return number + 1

    def measure(number: int) -> Measured:
        return Measured(math.nan, fun=losses[-1] if losses else 1.0)

    run = drive(
        0, step, measure, Limits(max_iterations, max_evaluations=max_evaluations, max_seconds=max_seconds),
        counts=counts, callback=callback, keep_history=keep_history, progress=progress,
    )  # fmt: skip
    last = losses[-max(len(losses) // 10, 1) :]
    return Result(
        x=net, fun=sum(last) / len(last) if last else math.nan, success=run.status.success, status=run.status,
        message=run.message, nit=run.nit, nfev=counts["nfev"], history=run.history,
    )  # fmt: skip


def direction_loss(net: DirectionNet, family: Family, right: Tensor) -> Tensor:
    """Return ‖b − A q (q·b)/(q·Aq)‖² for each b of `right` (batch, *grid), shape (batch,)."""
    direction = net(right[:, None])[:, 0]
    image = family.apply(direction)
    along, curvature = (direction * right).flatten(1).sum(1), (direction * image).flatten(1).sum(1)
    length = (along / curvature).reshape(-1, *[1] * (right.dim() - 1))
    return (right - length * image).flatten(1).square().sum(1)
