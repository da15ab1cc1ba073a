"""Optimistic mirror descent for exp-concave losses: a quadratic norm that grows with the gradients seen."""

from __future__ import annotations

import torch
from torch import Tensor

from .learner import Learner, need_positive
from .sets import ConvexSet


class ExpConcaveOMD(Learner):
    """Optimistic mirror descent for α-exp-concave losses (exp(−α fₜ) concave: squared and logistic losses, log-wealth):

        Hₜ = regularization I + (β/2) G² I + (β/2) Σ_{s<t} gₛ gₛ',  β = ½ min(1/(4 G D), α),
        xₜ = Π_H(x̂ₜ − Hₜ⁻¹ Mₜ),  x̂ₜ₊₁ = Π_H(x̂ₜ − Hₜ⁻¹ gₜ),  Mₜ₊₁ = gₜ;  Π_H projects in the norm of Hₜ.

    `gradient_bound` G, `exp_concavity` α; the constants of Hₜ are recalled, not checked against the paper:
    `regularization` (1) and `beta` override them. Regret O(d log(σ²₁:T + Σ²₁:T)). Memory d²; time O(d²) where the steps stay
    inside the set, else O(d³) for the ball and an inner iteration for the others: not for d above a few hundred.

    Source: Chen, Tu, Zhao, Zhang, ICML 2023 and JMLR 25 (2024); without hints it is the online Newton step.

    >>> from trainwright.solvers.online import Simplex
    >>> learner = ExpConcaveOMD(Simplex(2), gradient_bound=2.0, exp_concavity=1.0)
    >>> returns = torch.tensor([1.3, 0.8], dtype=torch.float64)
    >>> for _ in range(300):
    ...     learner.update(-returns / (returns @ learner.predict()))  # the gradient of −log wealth
    >>> bool(learner.predict()[0] > 0.95)
    True
    """

    def __init__(
        self,
        feasible: ConvexSet,
        *,
        gradient_bound: float,
        exp_concavity: float,
        regularization: float = 1.0,
        beta: float | None = None,
        batch_shape: tuple[int, ...] = (),
    ) -> None:
        need_positive(gradient_bound=gradient_bound, exp_concavity=exp_concavity, regularization=regularization)
        super().__init__(feasible, batch_shape)
        self.beta = beta if beta is not None else min(1 / (4 * gradient_bound * feasible.diameter), exp_concavity) / 2
        need_positive(beta=self.beta)
        self.gradient_bound = gradient_bound
        scale = regularization + self.beta / 2 * gradient_bound**2
        eye = torch.eye(self.start.shape[-1], dtype=self.start.dtype, device=self.start.device)
        self.metric = (scale * eye).expand(*batch_shape, *eye.shape).clone()
        self.inverse = (eye / scale).expand(*batch_shape, *eye.shape).clone()
        self.auxiliary = self.start

    def _move(self, gradient: Tensor) -> Tensor:
        target = self.auxiliary - (self.inverse @ gradient.unsqueeze(-1)).squeeze(-1)
        if torch.equal(self.feasible.project(target), target):
            return target
        return self.feasible.project_in(self.metric, target)

    def _play(self) -> Tensor:
        return self._move(self.hint)

    def _learn(self, gradient: Tensor) -> None:
        self.auxiliary = self._move(gradient)
        direction = (self.inverse @ gradient.unsqueeze(-1)).squeeze(-1)
        norm = 1 + self.beta / 2 * (gradient * direction).sum(-1, keepdim=True).unsqueeze(-1)
        self.inverse = self.inverse - self.beta / 2 * _outer(direction) / norm
        self.metric = self.metric + self.beta / 2 * _outer(gradient)


def _outer(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)
