"""Single-trajectory estimators of the gradient and of Hessian-vector products of J(θ) = E Σ_h γʰ r_h.

Φ(θ, τ) = Σ_h Ψ_h log π(a_h|s_h),  Ψ_h = Σ_{l ≥ h} γˡ r_l − γʰ b(s_h, h)                     `Estimator._sums`
∇J ≈ mean of ∇Φ(θ, τ)                                                                       `Estimator.gradient`
∇²J u ≈ mean of ∇²Φ(θ, τ) u + ∇Φ(θ, τ) (∇ log p(τ|θ)·u), the product per trajectory          `Estimator.hessian_vector`
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

from ..driver import Counts, Ended
from ..outcome import Status
from ..values import Packing
from .baseline import LinearBaseline
from .rollout import Trajectories, rollout


class Estimator:
    """What the methods see: trajectories under parameters θ (a vector), and the estimates from them; calls are counted.

    `ntraj` trajectories (also `nfev`), `nsteps` steps of the environment that count, `nhvp` Hessian-vector products.
    """

    def __init__(
        self,
        env: Any,
        policy: nn.Module,
        *,
        batch_size: int,
        horizon: int,
        discount: float,
        baseline: LinearBaseline | None,
        generator: torch.Generator,
    ) -> None:
        self.env, self.batch_size, self.horizon, self.discount = env, batch_size, horizon, discount
        self.baseline, self.generator = baseline, generator
        self.acting = copy.deepcopy(policy)
        self.packing, self.start = Packing.of(dict(policy.named_parameters()), "policy")
        self.counts = Counts(nfev=0, ntraj=0, nsteps=0, nhvp=0)
        self.scored = _LogProb(self.acting)

    def load(self, theta: Tensor) -> nn.Module:
        """Return the acting policy with the parameters θ in it."""
        with torch.no_grad():
            for parameter, value in zip(self.acting.parameters(), self.packing.unpack(theta).values()):
                parameter.copy_(value)
        return self.acting

    def sample(self, theta: Tensor) -> Trajectories:
        """Return a batch of trajectories under θ; a θ that is not finite ends the run."""
        if not torch.isfinite(theta).all():
            raise Ended(Status.NOT_FINITE)
        trajectories = rollout(self.env, self.load(theta), self.batch_size, self.horizon, self.generator)
        self.counts.add(nfev=self.batch_size, ntraj=self.batch_size, nsteps=len(trajectories.owner))
        return trajectories

    def gradient(self, theta: Tensor, trajectories: Trajectories) -> Tensor:
        """Return the mean of ∇Φ at θ."""
        at = theta.detach().requires_grad_()
        return grad(self._sums(at, trajectories, self._weights(trajectories))[0].mean(), at)[0]

    def hessian_vector(self, theta: Tensor, trajectories: Trajectories, vector: Tensor) -> Tensor:
        """Return the mean of ∇²Φ u + ∇Φ (∇ log p·u); unbiased where the trajectories were drawn under θ."""
        self.counts.add(nhvp=1)
        at = theta.detach().requires_grad_()
        phi, log_prob = self._sums(at, trajectories, self._weights(trajectories))
        # reverse over reverse: the derivative of Σ vᵢ ∇ log pᵢ·u in v is the score of each trajectory along u
        each = torch.ones_like(log_prob).requires_grad_()
        slope = grad(log_prob, at, each, create_graph=True)[0] @ vector
        scores = grad(slope, each, retain_graph=True)[0]
        along = grad(phi.mean(), at, create_graph=True)[0] @ vector
        return grad(along + (scores * phi).mean(), at)[0]

    def learn_baseline(self, trajectories: Trajectories) -> None:
        """Fit the baseline, if there is one, for the estimates to come."""
        if self.baseline is not None:
            self.baseline.fit(trajectories)

    def _weights(self, trajectories: Trajectories) -> Tensor:
        weights = trajectories.rewards_to_go(self.discount)
        if self.baseline is None:
            return weights
        return weights - self.discount ** trajectories.time.to(weights) * self.baseline(trajectories)

    def _sums(self, theta: Tensor, trajectories: Trajectories, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return Φ and log p(τ|θ) (up to what does not depend on θ) per trajectory."""
        named = {f"policy.{name}": value for name, value in self.packing.unpack(theta).items()}
        log_probs = functional_call(self.scored, named, (trajectories.observations, trajectories.actions))
        return trajectories.per_trajectory(weights * log_probs), trajectories.per_trajectory(log_probs)


class _LogProb(nn.Module):
    """The policy's `log_prob` as a forward, which `functional_call` wants."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.policy.log_prob(observations, actions)  # type: ignore[operator]
