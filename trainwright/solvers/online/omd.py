"""Optimistic online mirror descent for convex and strongly convex losses."""

from __future__ import annotations

from torch import Tensor

from .learner import Learner, need_positive, one_of, squared
from .sets import ConvexSet


class OptimisticOMD(Learner):
    """Optimistic mirror descent with the Euclidean norm, for losses between stochastic and adversarial (the SEA model):

        xₜ = Π(x̂ₜ − ηₜ Mₜ), then, with gₜ = ∇fₜ(xₜ), x̂ₜ₊₁ = Π(x̂ₜ − ηₜ gₜ), Mₜ₊₁ = gₜ;  M₁ = 0, x̂₁ the set's centre.

    Convex (`gradient_bound` G ≥ ‖gₜ‖): ηₜ = D / √(delta + 4 G² + Vₜ₋₁), Vₜ = Σ ‖gₛ − Mₛ‖², D the diameter. Expected regret
    O(√σ²₁:T + √Σ²₁:T): the gradients' variance and the drift of their mean. Only the mean losses need be convex.
    Strongly convex (`strong_convexity` λ): ηₜ = rate / (λ t); the rate, 2, is recalled, not checked against the paper.

    Two projections and one gradient a round. It wins where gradients can be foreseen: against drift, or with little noise. In
    independent noise `OGD` is better by a factor of 1.4 to 4, `AdaGradNorm` holds out against drift as well, and where gradients
    change their sign each round optimism hurts.

    Sources: Chen, Tu, Zhao, Zhang, Optimistic Online Mirror Descent for Bridging Stochastic and Adversarial Online Convex
    Optimization, ICML 2023 and JMLR 25 (2024).

    >>> import torch
    >>> from trainwright.solvers.online import Ball
    >>> learner = OptimisticOMD(Ball(2), gradient_bound=2.0)
    >>> for _ in range(200):
    ...     learner.update(learner.predict() - torch.tensor([0.6, 0.0]))
    >>> bool((learner.predict() - torch.tensor([0.6, 0.0])).norm() < 0.01)
    True
    """

    def __init__(
        self,
        feasible: ConvexSet,
        *,
        gradient_bound: float | None = None,
        strong_convexity: float | None = None,
        delta: float = 1.0,
        rate: float = 2.0,
        batch_shape: tuple[int, ...] = (),
    ) -> None:
        one_of(gradient_bound, strong_convexity)
        need_positive(delta=delta, rate=rate)
        super().__init__(feasible, batch_shape)
        self.gradient_bound, self.strong_convexity = gradient_bound, strong_convexity
        self.delta, self.rate = delta, rate
        self.auxiliary, self.surprise = self.start, self._zeros()

    def _step(self) -> Tensor | float:
        if self.strong_convexity is not None:
            return self.rate / (self.strong_convexity * (self.num_rounds + 1))
        assert self.gradient_bound is not None
        root = (self.delta + 4 * self.gradient_bound**2 + self.surprise).sqrt()
        return (self.feasible.diameter / root).to(self.start)

    def _play(self) -> Tensor:
        return self.feasible.project(self.auxiliary - self._step() * self.hint)

    def _learn(self, gradient: Tensor) -> None:
        self.auxiliary = self.feasible.project(self.auxiliary - self._step() * gradient)
        self.surprise = self.surprise + squared(gradient - self.hint)
