"""Optimistic mirror descent at many step sizes under one optimistic Hedge: regret against moving comparators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .learner import Learner, need_positive, squared
from .sets import ConvexSet


class DynamicOMD(Learner):
    """Optimistic descent with steps ηᵢ = 2^(i−1) η_min, mixed by optimistic Hedge on losses that charge for moving:

        xₜ = Σᵢ pₜ,ᵢ xₜ,ᵢ,  pₜ,ᵢ ∝ exp(−εₜ (Σ_{s<t} ℓₛ,ᵢ + mₜ,ᵢ)),
        ℓₜ,ᵢ = ⟨gₜ, xₜ,ᵢ⟩ + correction ‖xₜ,ᵢ − xₜ₋₁,ᵢ‖²,  mₜ,ᵢ the same with Mₜ = gₜ₋₁ in place of gₜ.

    All experts share the one gradient of a round, taken at xₜ. Regret against any sequence uₜ with path length P:
    O(P + √(1 + P) (√σ²₁:T + √Σ²₁:T)), P unknown beforehand. `gradient_bound` G, `smoothness` L, `num_rounds` T.

    The constants are recalled, not checked against the paper: `smallest_step` D/(G √(8 T)); the largest is near 1/(8 L);
    `correction` 2 L; `meta_rate` c in εₜ = c √(log N) / (D √(G² + Σ_{s<t} ‖gₛ − Mₛ‖²)), c = 1. Time and memory are those of
    `OptimisticOMD` times N = O(log T). Against a fixed comparator `OptimisticOMD` is as good and cheaper.

    Source: Chen, Tu, Zhao, Zhang, ICML 2023 and JMLR 25 (2024).

    >>> from trainwright.solvers.online import Ball
    >>> learner = DynamicOMD(Ball(2), gradient_bound=2.0, smoothness=1.0, num_rounds=1000)
    >>> learner.num_experts, learner.predict()
    (5, tensor([0., 0.], dtype=torch.float64))
    """

    def __init__(
        self,
        feasible: ConvexSet,
        *,
        gradient_bound: float,
        smoothness: float,
        num_rounds: int,
        smallest_step: float | None = None,
        correction: float | None = None,
        meta_rate: float = 1.0,
        batch_shape: tuple[int, ...] = (),
    ) -> None:
        need_positive(gradient_bound=gradient_bound, smoothness=smoothness, num_rounds=num_rounds, meta_rate=meta_rate)
        super().__init__(feasible, batch_shape)
        lowest = smallest_step or feasible.diameter / (gradient_bound * math.sqrt(8 * num_rounds))
        self.num_experts = 1 + max(0, math.ceil(math.log2(1 / (8 * smoothness * lowest))))
        self.correction = 2 * smoothness if correction is None else correction
        self.gradient_bound, self.meta_rate = gradient_bound, meta_rate
        self.steps = lowest * 2.0 ** torch.arange(self.num_experts).to(self.start).unsqueeze(-1)
        self.auxiliary = self.experts = self.plays = self.start.unsqueeze(-2).expand(*batch_shape, self.num_experts, -1)
        self.losses = torch.zeros_like(self.experts[..., 0], dtype=torch.float64)
        self.surprise = self._zeros()

    def _play(self) -> Tensor:
        self.plays = plays = self.feasible.project(self.auxiliary - self.steps * self.hint.unsqueeze(-2))
        expected = self.losses + self._surrogate(plays, self.hint)
        assert self.gradient_bound is not None
        root = (self.gradient_bound**2 + self.surprise).sqrt()
        rate = self.meta_rate * math.sqrt(math.log(max(2, self.num_experts))) / (self.feasible.diameter * root)
        weights = torch.softmax(-rate * expected, -1).to(self.start)
        return (weights.unsqueeze(-1) * plays).sum(-2)

    def _learn(self, gradient: Tensor) -> None:
        self.losses = self.losses + self._surrogate(self.plays, gradient)
        self.auxiliary = self.feasible.project(self.auxiliary - self.steps * gradient.unsqueeze(-2))
        self.surprise = self.surprise + squared(gradient - self.hint)
        self.experts = self.plays

    def _surrogate(self, plays: Tensor, gradient: Tensor) -> Tensor:
        moved = (plays - self.experts).double().square().sum(-1)
        return (plays * gradient.unsqueeze(-2)).double().sum(-1) + self.correction * moved
