"""Variance-reduced descent ascent with restarts: what SPIDER-GDA and SVRG-GDA share; they differ in one flag.

estimate = anchor estimate + mean over the batch of [∇fᵢ(now) − ∇fᵢ(anchor)]          `_Reduced._estimate`
anchor   = the previous iterate (recursive, SPIDER) or the last full gradient's point (SVRG)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...artifacts import UserError
from ..seeds import need_count
from .gda import Point
from .problem import Gradients
from .steps import check_steps


@dataclass(frozen=True)
class Anchored(Point):
    """An iterate, the anchor with the estimate that stands there, and the incumbent-to-be."""

    anchor: Point | None
    grad_x: Tensor
    grad_y: Tensor
    inner: int
    chosen: int
    kept: Point


@dataclass(frozen=True)
class _Reduced:
    recursive: ClassVar[bool]

    step_x: float
    step_y: float
    batch_size: int = 1
    period: int | None = None
    num_inner: int | None = None
    output_rule: Literal["uniform", "last"] = "uniform"
    batches: Literal["independent", "shared"] = "independent"

    def __post_init__(self) -> None:
        check_steps(self.step_x, self.step_y)
        for name in ("batch_size", "period", "num_inner"):
            if (value := getattr(self, name)) is not None or name == "batch_size":
                need_count(name, value, 1)
        if self.output_rule not in ("uniform", "last") or self.batches not in ("independent", "shared"):
            raise UserError(
                "output_rule 'uniform' or 'last' and batches 'independent' or 'shared' are needed; "
                f"got {self.output_rule!r} and {self.batches!r}; give one of these"
            )

    def check_every(self, num_components: int) -> int:
        """Return how many iterations stand between two measurements: those between two full gradients."""
        return min(self.period or num_components, self.restart_length(num_components))

    def restart_length(self, num_components: int) -> int:
        """Return how many iterations one run of the inner loop takes."""
        return self.num_inner or self.period or num_components

    def start(self, oracle: Gradients, x: Tensor, y: Tensor, generator: torch.Generator) -> Anchored:
        """Return the state at the start of an inner loop; which of its iterates will be handed on is drawn here."""
        length = self.restart_length(oracle.num_components)
        chosen = int(torch.randint(length, (), generator=generator, device=generator.device))
        return Anchored(x, y, None, torch.zeros_like(x), torch.zeros_like(y), 0, chosen, Point(x, y))

    def step(self, oracle: Gradients, state: Anchored, generator: torch.Generator) -> Anchored:
        """Return the next state; the last of an inner loop is the start of the next, at the incumbent."""
        grad_x, grad_y = self._estimate(oracle, state, generator)
        x, y = state.x - self.step_x * grad_x, state.y + self.step_y * grad_y
        here = Point(state.x, state.y)
        kept = here if state.inner == state.chosen else state.kept
        if state.inner + 1 == self.restart_length(oracle.num_components):
            incumbent = kept if self.output_rule == "uniform" else Point(x, y)
            return self.start(oracle, incumbent.x, incumbent.y, generator)
        moved = replace(state, x=x, y=y, inner=state.inner + 1, kept=kept)
        if self.recursive or state.inner % (self.period or oracle.num_components) == 0:
            moved = replace(moved, anchor=here, grad_x=grad_x, grad_y=grad_y)
        return moved

    def output(self, state: Anchored) -> Point:
        """Return what the method hands out: the iterate drawn from this inner loop, or until that is reached, from the last."""
        return state.kept if self.output_rule == "uniform" else state

    def _estimate(self, oracle: Gradients, state: Anchored, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if state.anchor is None or state.inner % (self.period or oracle.num_components) == 0:
            return oracle.full(state.x, state.y)
        indices_x = self._draw(oracle, generator)
        indices_y = indices_x if self.batches == "shared" else self._draw(oracle, generator)
        now_x, now_y = oracle.batch(state.x, state.y, indices_x, indices_y)
        old_x, old_y = oracle.batch(state.anchor.x, state.anchor.y, indices_x, indices_y)
        return state.grad_x + (now_x - old_x), state.grad_y + (now_y - old_y)

    def _draw(self, oracle: Gradients, generator: torch.Generator) -> Tensor:
        return torch.randint(oracle.num_components, (self.batch_size,), generator=generator, device=generator.device)
