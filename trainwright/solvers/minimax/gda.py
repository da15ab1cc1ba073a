"""Gradient descent ascent on full gradients: the baseline of the family."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Gradients
from .steps import check_steps


@dataclass(frozen=True)
class Point:
    """Where a method stands; methods with a memory extend it."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class GDA:
    """Simultaneous gradient descent ascent: x ← x − step_x ∇ₓf(x, y), y ← y + step_y ∇ᵧf(x, y), old gradients for both.

    `num_components` oracle calls an iteration. Baseline: with many components the variance-reduced methods of this
    family need far fewer calls. On a bilinear game without curvature it diverges whatever the steps.

    >>> GDA(step_x=0.1, step_y=0.1).restart_length(num_components=50)
    1
    """

    step_x: float
    step_y: float

    def __post_init__(self) -> None:
        check_steps(self.step_x, self.step_y)

    def check_every(self, num_components: int) -> int:
        """Return how many iterations stand between two measurements."""
        return 1

    def restart_length(self, num_components: int) -> int:
        """Return how many iterations one run of the inner loop takes."""
        return 1

    def start(self, oracle: Gradients, x: Tensor, y: Tensor, generator: torch.Generator) -> Point:
        """Return the state at the start."""
        return Point(x, y)

    def step(self, oracle: Gradients, state: Point, generator: torch.Generator) -> Point:
        """Return the next state."""
        grad_x, grad_y = oracle.full(state.x, state.y)
        return Point(state.x - self.step_x * grad_x, state.y + self.step_y * grad_y)

    def output(self, state: Point) -> Point:
        """Return what the method hands out."""
        return state
