"""Online gradient descent and its adaptive form: the baselines of the family."""

from __future__ import annotations

import math

from torch import Tensor

from .learner import Learner, need_positive, one_of, squared
from .sets import ConvexSet


class OGD(Learner):
    """Online gradient descent, xₜ₊₁ = Π(xₜ − ηₜ gₜ), with ηₜ = D/(G √t), or 1/(μ t) for μ-strongly convex losses.

    Regret O(D G √T) or O((G²/μ) log T). Hard to beat in independent noise; optimistic methods win against drift.

    Source: Zinkevich, ICML 2003; Hazan, Agarwal, Kale, Machine Learning 69 (2007).

    >>> import torch
    >>> from trainwright.solvers.online import Ball
    >>> learner = OGD(Ball(1), gradient_bound=1.0)
    >>> learner.predict(); learner.update(torch.tensor([0.25], dtype=torch.float64)); learner.predict()
    tensor([0.], dtype=torch.float64)
    tensor([-0.5000], dtype=torch.float64)
    """

    def __init__(
        self,
        feasible: ConvexSet,
        *,
        gradient_bound: float | None = None,
        strong_convexity: float | None = None,
        batch_shape: tuple[int, ...] = (),
    ) -> None:
        one_of(gradient_bound, strong_convexity)
        super().__init__(feasible, batch_shape)
        self.gradient_bound, self.strong_convexity = gradient_bound, strong_convexity
        self.current = self.start

    def _play(self) -> Tensor:
        return self.current

    def _learn(self, gradient: Tensor) -> None:
        num = self.num_rounds + 1
        if self.strong_convexity is not None:
            step = 1 / (self.strong_convexity * num)
        else:
            assert self.gradient_bound is not None
            step = self.feasible.diameter / (self.gradient_bound * math.sqrt(num))
        self.current = self.feasible.project(self.current - step * gradient)


class AdaGradNorm(Learner):
    """Online gradient descent with one adaptive step per player, ηₜ = scale D / √(Σ_{s≤t} ‖gₛ‖²); needs no bound on gradients.

    Regret ≤ √2 D √(Σ ‖gₜ‖²) at the default scale 1/√2. (AdaGrad with one step per coordinate needs a projection in its own norm.)

    Source: Streeter and McMahan, 2010; Duchi, Hazan, Singer, JMLR 12 (2011).

    >>> import torch
    >>> from trainwright.solvers.online import Ball
    >>> learner = AdaGradNorm(Ball(1))
    >>> _ = learner.predict(); learner.update(torch.tensor([4.0])); learner.predict()
    tensor([-1.], dtype=torch.float64)
    """

    def __init__(self, feasible: ConvexSet, *, scale: float = 2**-0.5, batch_shape: tuple[int, ...] = ()) -> None:
        need_positive(scale=scale)
        super().__init__(feasible, batch_shape)
        self.scale, self.current, self.sum_of_squares = scale, self.start, self._zeros()

    def _play(self) -> Tensor:
        return self.current

    def _learn(self, gradient: Tensor) -> None:
        self.sum_of_squares = self.sum_of_squares + squared(gradient)
        root = self.sum_of_squares.sqrt().clamp_min(1e-300)
        step = (self.scale * self.feasible.diameter / root).to(self.start)
        self.current = self.feasible.project(self.current - step * gradient)
