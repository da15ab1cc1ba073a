"""Optimistic follow-the-regularised-leader, and its form without regulariser for strongly convex losses."""

from __future__ import annotations

import torch
from torch import Tensor

from .learner import Learner, need_positive, squared
from .sets import ConvexSet


class OptimisticFTRL(Learner):
    """Optimistic follow-the-regularised-leader for convex losses (SEA model), c the set's centre:

        xₜ = argmin over the set of ⟨Σ_{s<t} gₛ + Mₜ, x⟩ + ‖x − c‖²/ηₜ = Π(c − (ηₜ/2)(Σ gₛ + Mₜ)),  Mₜ = gₜ₋₁,
        ηₜ = D² / (ν + Σ_{s<t} ηₛ ‖gₛ − Mₛ‖²).

    `smoothness` L of the mean losses and `gradient_bound` G give ν = L D² + D G; `nu` overrides it (2 D G: the worst-case
    bound). Expected regret ≤ D (6 σ̄ + 3√2 Σ̄) √T + (3√2/2) D G + ν + (4 D²G² + 9 L²D⁴)/ν.

    One projection, of the play and never of the gradients' sum, and one gradient a round. Wins and losses as `OptimisticOMD`.

    Source: Sachs, Hadiji, van Erven, Guzmán, Between Stochastic and Adversarial Online Convex Optimization, NeurIPS 2022.

    >>> from trainwright.solvers.online import Simplex
    >>> learner = OptimisticFTRL(Simplex(3), gradient_bound=1.5, smoothness=1.0)
    >>> for _ in range(100):
    ...     _ = learner.predict()
    ...     learner.update(torch.tensor([1.0, 0.0, 1.0]))
    >>> learner.predict()
    tensor([0., 1., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        feasible: ConvexSet,
        *,
        gradient_bound: float,
        smoothness: float = 0.0,
        nu: float | None = None,
        batch_shape: tuple[int, ...] = (),
    ) -> None:
        diameter = feasible.diameter
        self.nu = smoothness * diameter**2 + diameter * gradient_bound if nu is None else nu
        need_positive(gradient_bound=gradient_bound, nu=self.nu, smoothness=1.0 + smoothness)
        super().__init__(feasible, batch_shape)
        self.gradient_bound = gradient_bound
        self.total, self.weighted = torch.zeros_like(self.start), self._zeros()

    def _step(self) -> Tensor:
        return self.feasible.diameter**2 / (self.nu + self.weighted)

    def _play(self) -> Tensor:
        return self.feasible.project(self.start - (self._step() / 2).to(self.start) * (self.total + self.hint))

    def _learn(self, gradient: Tensor) -> None:
        self.weighted = self.weighted + self._step() * squared(gradient - self.hint)
        self.total = self.total + gradient


class OptimisticFTL(Learner):
    """Optimistic follow-the-leader for μ-strongly convex losses; no other parameter:

        xₜ = argmin over the set of Σ_{s<t} [⟨gₛ, x − xₛ⟩ + (μ/2) ‖x − xₛ‖²] + ⟨Mₜ, x⟩
           = Π((μ Σ xₛ − Σ gₛ − Mₜ) / (μ (t − 1))),  x₁ the set's centre, Mₜ = gₜ₋₁.

    Regret O(log T) with the variances in front. In independent noise `OGD` with 1/(μ t) is somewhat better.

    Source: Sachs, Hadiji, van Erven, Guzmán, NeurIPS 2022.

    >>> from trainwright.solvers.online import Ball
    >>> learner = OptimisticFTL(Ball(1, radius=2.0), strong_convexity=1.0)
    >>> for _ in range(200):
    ...     learner.update(learner.predict() - 1.5)
    >>> round(float(learner.predict()), 3)
    1.5
    """

    def __init__(self, feasible: ConvexSet, *, strong_convexity: float, batch_shape: tuple[int, ...] = ()) -> None:
        need_positive(strong_convexity=strong_convexity)
        super().__init__(feasible, batch_shape)
        self.strong_convexity = strong_convexity
        self.pull = torch.zeros_like(self.start)

    def _play(self) -> Tensor:
        if self.num_rounds == 0:
            return self.start
        return self.feasible.project((self.pull - self.hint) / (self.strong_convexity * self.num_rounds))

    def _learn(self, gradient: Tensor) -> None:
        assert self.play is not None
        self.pull = self.pull + self.strong_convexity * self.play - gradient
