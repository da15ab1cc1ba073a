"""AccSPIDER-GDA: an outer loop of proximal points around a descent ascent method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ...artifacts import UserError
from .gda import GDA, Point
from .problem import Gradients, Pulled
from .spider import SpiderGDA
from .svrg import SVRGGDA


@dataclass(frozen=True)
class Outer(Point):
    """The inner method's state, the centre of the proximal term, the last outer x, and the drawn outer iterate."""

    inner: Any
    num_done: int
    num_outer: int
    centre: Tensor
    last: Tensor
    drawn: Point


@dataclass(frozen=True)
class AccSpiderGDA:
    """AccSPIDER-GDA (Catalyst): xₖ₊₁, yₖ₊₁ ≈ the saddle of f(x, y) + (beta/2) ‖x − uₖ‖², found by `inner` from (xₖ, yₖ);

        uₖ₊₁ = xₖ₊₁ + gamma (xₖ₊₁ − xₖ).

    `inner`: a `SpiderGDA` with the steps of the sub-problem (any method of the family is taken). `beta` ≥ 0: the
    theory's is twice the smoothness L, the authors' experiments take about L/(20 n). `gamma` in [0, 1): the theory's is 0 (an
    inexact proximal point, no momentum), the experiments take 0.999. `num_restarts`: inner loops per outer step.
    `output_rule`: "last" (f PL in both), or "uniform": a random outer iterate (PL in y alone).

    With an exact inner solution f's primal gap shrinks by 1 − μₓ/(2 beta + μₓ) an outer step. It helps where κₓ is
    large; for κₓκᵧ < √n there is no gain, and with beta = L/(20 n) little more than an extrapolation. In our measurements
    it ended a little below its inner method at condition 200, not below `SVRGGDA`. The sub-problem is strongly convex in
    x, so x is the fast variable: take step_x larger than step_y, and both from the smoothness L + beta
    (`theory.acc_spider`). The proximal term enters as its exact gradient at every step; the authors' code adds it to the
    recursive estimate, where it piles up.

    Source: Chen, Yao, Luo, NeurIPS 2022 (arXiv 2307.15868), algorithm 2.

    >>> AccSpiderGDA(SpiderGDA(0.1, 0.01, period=10), beta=2.0, num_restarts=3).restart_length(num_components=100)
    30
    """

    inner: SpiderGDA | SVRGGDA | GDA
    beta: float
    gamma: float = 0.0
    num_restarts: int = 1
    output_rule: Literal["last", "uniform"] = "last"

    def __post_init__(self) -> None:
        if not (0 <= self.beta < float("inf") and 0 <= self.gamma < 1 and self.num_restarts >= 1):
            raise UserError(
                "beta ≥ 0, gamma in [0, 1) and num_restarts ≥ 1 are needed; "
                f"got {self.beta}, {self.gamma} and {self.num_restarts}; start with beta = 2 L and gamma = 0"
            )
        if self.output_rule not in ("last", "uniform"):
            raise UserError(f"output_rule 'last' or 'uniform' is needed; got {self.output_rule!r}; give one of these")

    def check_every(self, num_components: int) -> int:
        """Return how many iterations stand between two measurements."""
        return self.inner.check_every(num_components)

    def restart_length(self, num_components: int) -> int:
        """Return how many inner iterations an outer step takes."""
        return self.num_restarts * self.inner.restart_length(num_components)

    def start(self, oracle: Gradients, x: Tensor, y: Tensor, generator: torch.Generator) -> Outer:
        """Return the state at the start."""
        inner = self.inner.start(Pulled(oracle, self.beta, x), x, y, generator)
        return Outer(x, y, inner, 0, 0, x, x, Point(x, y))

    def step(self, oracle: Gradients, state: Outer, generator: torch.Generator) -> Outer:
        """Return the state after one step of the inner method, and of the outer one where its turn has come."""
        pulled = Pulled(oracle, self.beta, state.centre)
        inner: Any = self.inner.step(pulled, state.inner, generator)  # type: ignore[arg-type]
        moved = replace(state, x=inner.x, y=inner.y, inner=inner, num_done=state.num_done + 1)
        if moved.num_done < self.restart_length(oracle.num_components):
            return moved
        return self._recentre(oracle, moved, generator)

    def output(self, state: Outer) -> Point:
        """Return what the method hands out."""
        return state.drawn if self.output_rule == "uniform" else state

    def _recentre(self, oracle: Gradients, state: Outer, generator: torch.Generator) -> Outer:
        centre = state.x + self.gamma * (state.x - state.last)
        num_outer = state.num_outer + 1
        take = int(torch.randint(num_outer, (), generator=generator, device=generator.device)) == 0
        drawn = Point(state.x, state.y) if take else state.drawn
        inner = self.inner.start(Pulled(oracle, self.beta, centre), state.x, state.y, generator)
        return Outer(state.x, state.y, inner, 0, num_outer, centre, state.x, drawn)
