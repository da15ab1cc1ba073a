"""Linear decay: the schedule whose last iterate meets the bound of the best average, after an optional warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..artifacts import UserError


class ScheduledFactors(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that multiplies each group's base learning rate by a factor a step; 0 after the last."""

    def __init__(self, optimizer: torch.optim.Optimizer, factors: Sequence[float], last_epoch: int = -1) -> None:
        """`factors`: of the optimizer's first, second, … step, counted from where `last_epoch` is -1."""
        self.factors = [float(factor) for factor in factors]
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group for the step to come."""
        factor = self.factors[self.last_epoch] if self.last_epoch < len(self.factors) else 0.0
        return [base * factor for base in self.base_lrs]


class LinearDecay(ScheduledFactors):
    r"""Decay the learning rate linearly, so that the step after the last would have a learning rate of zero.

    With W warm-up steps of N in all, step k = 0, 1, … has the learning rate

        lr · (k + 1) / (W + 1)   for k < W,        lr · (N − k) / (N − W)   from there on.

    For convex losses of gradients up to G, a start within D of a minimiser and lr = D / (G √N), the *last* iterate is
    within D G / √N of the minimum: what the average of a constant learning rate reaches, without averaging. In deep
    learning it is the schedule to begin with. `num_steps` must be known: where the end of the run is open, use a
    constant learning rate and average.

    optimizer: whose groups' learning rates are the peaks.
    num_steps: N, optimizer steps in all; call `step()` after each. From then on the learning rate is 0.
    num_warmup_steps: W, usually about a twentieth of N for deep networks; 0 needs no warm-up.

    Raises `UserError` unless 0 ≤ W < N.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> schedule = LinearDecay(torch.optim.SGD([weight], lr=1.0), num_steps=4)
    >>> schedule.factors
    [1.0, 0.75, 0.5, 0.25]

    Source: Defazio, Cutkosky, Mehta, Mishchenko, *Optimal Linear Decay Learning Rate Schedules and Further
    Refinements*, 2023 (also *When, Why and How Much? Adaptive Learning Rate Scheduling by Refinement*). It departs in
    that the step with learning rate zero, which their T-th is, is left out: N steps here are T = N + 1 there.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, num_steps: int, *, num_warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        if not 0 <= num_warmup_steps < num_steps:
            raise UserError(
                f"LinearDecay needs 0 ≤ num_warmup_steps < num_steps; got {num_warmup_steps} and {num_steps}; "
                "give more steps, or fewer to warm up in"
            )
        rise = [(step + 1) / (num_warmup_steps + 1) for step in range(num_warmup_steps)]
        num_falling = num_steps - num_warmup_steps
        super().__init__(optimizer, rise + [left / num_falling for left in range(num_falling, 0, -1)], last_epoch)
