"""Optimizers compared at the points of one trajectory: what each would do there, and how far it would get.

direction u of each, θ − θ' of a copy     `_Shadow`
S(u) = uᵀHu / ‖u‖²                        `directional_sharpness`
least loss along −u/‖u‖                   `_least_along`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .sharpness import directional_sharpness

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Progress = Callable[[int, int], None]
_POINTS, _LEAST_POINTS, _SHRINK, _MAX_SHRINKS = 50, 4, 5.0, 30


@dataclass(frozen=True)
class DirectionAt:
    """What one optimizer would do at one point of the trajectory."""

    step: int
    name: str
    sharpness: float
    """S(u); NaN for a direction of length 0."""
    slope: float
    """⟨∇f, u⟩ / ‖u‖ of the loss: how steep it is downhill."""
    decrease: float
    """f(θ) less the least f found along the direction."""
    length: float
    """The step length at that least value."""


def compare_on_one_trajectory(
    loss_fn: Callable[[int], Tensor], params: list[Tensor], optimizers: Mapping[str, Make], leader: str, *,
    num_steps: int, interval: int = 1, first_length: float = 1.0, progress: Progress | None = None,
) -> list[DirectionAt]:  # fmt: skip
    r"""Follow one optimizer; at its points, measure the directions that all would take.

    Optimizers that are compared on runs of their own are compared at different places. Here each gets the same gradients at the
    same points, and keeps its state by them; only the leader moves the parameters. At every `interval`-th step the
    directional sharpness of each direction u and the least loss along −u/‖u‖ are measured: the loss is followed in equal steps
    until it exceeds its start, in steps five times smaller while fewer than four points lie below.

    loss_fn: of a step's number, the loss with its graph, without backward(); the same function each time it is called with one
        number, with a second derivative (eval mode). params: θ, moved by the leader. optimizers: by name, from a list of
        parameters to an optimizer that steps on gradients; weight decay is part of its direction. leader: one of the names.
    first_length: of the grid's steps, in units of ‖u‖ = 1.

    Returns a row an optimizer and measured step. Raises `UserError` for an unknown leader and settings out of range.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> loss = lambda step: (torch.tensor([1.0, 9.0]) * weight**2).sum() / 2
    >>> made = {"sgd": lambda params: torch.optim.SGD(params, lr=0.01)}
    >>> [round(row.sharpness, 2) for row in compare_on_one_trajectory(loss, [weight], made, "sgd", num_steps=1)]
    [8.9]

    Source: Pan, Li, *Toward Understanding Why Adam Converges Faster Than SGD for Transformers*, 2023, and the authors'
    code, whose pseudo-states these copies stand for.
    """
    if leader not in optimizers:
        raise UserError(f"a leader among {', '.join(optimizers)} is needed; got {leader!r}; name one of those")
    positive = ("above 0", lambda value: value > 0)
    check_range(
        "compare_on_one_trajectory", num_steps=(num_steps, *positive), interval=(interval, *positive),
        first_length=(first_length, *positive),
    )  # fmt: skip
    shadows = {name: _Shadow(make, params) for name, make in optimizers.items()}
    rows = []
    for step in range(num_steps):
        grads = _gradients(loss_fn(step), params)
        found = {name: shadow.direction(params, grads) for name, shadow in shadows.items()}
        if step % interval == 0:
            rows += [_measured(step, name, loss_fn, params, grads, u, first_length) for name, u in found.items()]
        with torch.no_grad():
            for param, part in zip(params, found[leader], strict=True):
                param.sub_(part)
        if progress is not None:
            progress(step + 1, num_steps)
    return rows


class _Shadow:
    """An optimizer over copies of the parameters, which are put at each point before it steps."""

    def __init__(self, make: Make, params: list[Tensor]) -> None:
        self._copies: list[Tensor] = [torch.nn.Parameter(param.detach().clone()) for param in params]
        self._optimizer = make(self._copies)

    @torch.no_grad()
    def direction(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Return θ − θ' of a step at `params`."""
        for copied, param, grad in zip(self._copies, params, grads, strict=True):
            copied.copy_(param)
            copied.grad = grad.clone()
        self._optimizer.step()
        return [param.detach() - copied.detach() for param, copied in zip(params, self._copies, strict=True)]


def _gradients(loss: Tensor, params: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, params, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad.detach() for grad, p in zip(found, params, strict=True)]


def _measured(
    step: int, name: str, loss_fn: Callable[[int], Tensor], params: list[Tensor], grads: list[Tensor],
    direction: list[Tensor], first_length: float,
) -> DirectionAt:  # fmt: skip
    norm = math.sqrt(sum(float(part.double().square().sum()) for part in direction))
    if not norm > 0.0:
        return DirectionAt(step, name, math.nan, 0.0, 0.0, 0.0)
    sharpness = directional_sharpness(lambda: loss_fn(step), params, direction)
    slope = sum(float((g.double() * u.double()).sum()) for g, u in zip(grads, direction, strict=True)) / norm
    decrease, length = _least_along(lambda: loss_fn(step), params, [u / norm for u in direction], first_length)
    return DirectionAt(step, name, sharpness, slope, decrease, length)


@torch.no_grad()
def _least_along(
    loss_of: Callable[[], Tensor], params: list[Tensor], unit: list[Tensor], spacing: float
) -> tuple[float, float]:
    """Return the largest decrease found along −unit, and where; the parameters stay as they are."""
    start = [param.detach().clone() for param in params]

    def loss_at(length: float) -> float:
        for param, old, part in zip(params, start, unit, strict=True):
            param.copy_(old - length * part)
        return float(loss_of())

    before = loss_at(0.0)
    best, where = before, 0.0
    try:
        for _ in range(_MAX_SHRINKS):
            num_below = 0
            for index in range(1, _POINTS + 1):
                value = loss_at(index * spacing)
                if not value <= before:
                    break
                num_below += 1
                best, where = min((best, where), (value, index * spacing))
            if num_below >= _LEAST_POINTS:
                break
            spacing /= _SHRINK
    finally:
        loss_at(0.0)
    return before - best, where
