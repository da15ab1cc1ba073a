"""The best fixed point in hindsight."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .descent import descend
from .sets import ConvexSet


def best_in_hindsight(
    gradient: Callable[[Tensor], Tensor],
    feasible: ConvexSet,
    smoothness: float,
    *,
    start: Tensor | None = None,
    rtol: float = 1e-10,
    max_iterations: int = 100_000,
) -> Tensor:
    """Return argmin over the set of F(x) = Σₜ fₜ(x), convex, whose gradient is given: the comparator of the regret.

    `gradient`: (…, d) → (…, d), of the sum over all rounds; `smoothness`: the Lipschitz constant of that gradient, positive. Ends
    where a step of size 1/smoothness moves a point by at most `rtol` of the set's diameter. Accelerated, with restarts.

    >>> import torch
    >>> from trainwright.solvers.online import Ball
    >>> target = torch.tensor([3.0, 4.0], dtype=torch.float64)
    >>> best_in_hindsight(lambda x: 10 * (x - target), Ball(2), smoothness=10.0)
    tensor([0.6000, 0.8000], dtype=torch.float64)
    """
    x = feasible.project(feasible.centre if start is None else start)
    return descend(gradient, feasible.project, x, smoothness, rtol * feasible.diameter, max_iterations)
