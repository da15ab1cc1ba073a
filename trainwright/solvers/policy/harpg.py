"""HARPG and N-HARPG: Hessian-aided recursive policy gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .ascent import Ascent, check, first, moved, power, state_of
from .estimators import Estimator


@dataclass(frozen=True)
class HARPG:
    """(N-)HARPG: momentum carried along by Hessian-vector products taken at a random point of the last step:

        q ~ U[0, 1], θ̂ₜ = q θₜ + (1 − q) θₜ₋₁, τ̂ₜ drawn under θ̂ₜ, vₜ = B(θ̂ₜ, τ̂ₜ)(θₜ − θₜ₋₁),
        dₜ = (1 − ηₜ)(dₜ₋₁ + vₜ) + ηₜ g(θₜ, τₜ),  θₜ₊₁ = θₜ + γₜ dₜ  (γₜ dₜ/‖dₜ‖ where `normalized`: N-HARPG);

    γₜ = step (2/(t+2))^step_power, ηₜ = momentum (2/(t+2))^momentum_power; `step_power` is 1/2 unless given, 1 where
    normalised.
    B is unbiased: ∇²Φ u + ∇Φ (∇ log p·u), the product taken per trajectory.

    Two batches and one Hessian-vector product an iteration; four vectors. Õ(ε⁻²) trajectories for Fisher-non-degenerate
    policies. On small problems a tuned `REINFORCE` was not beaten, and with single trajectories and large steps some runs
    saturate at a wrong action early on; batches mend that. Nor does d follow ∇J more closely than plain normalised momentum's
    with single trajectories; with eight an estimate it does.

    Source: Fatkhullin, Barakat, Kireeva, He, ICML 2023 (arXiv 2302.01734). Their code forms the score term from batch means and
    with the other sign, which loses it; here it is the paper's.

    >>> HARPG(step=0.5).exponent, HARPG(step=0.5, normalized=True).exponent
    (0.5, 1.0)
    """

    step: float
    momentum: float = 1.0
    step_power: float | None = None
    momentum_power: float = 1.0
    normalized: bool = False

    def __post_init__(self) -> None:
        check(self.step, self.momentum)

    @property
    def exponent(self) -> float:
        """The power of the step's decay."""
        if self.step_power is not None:
            return self.step_power
        return 1.0 if self.normalized else 0.5

    def start(self, oracle: Estimator, theta: Tensor) -> Ascent:
        """Return the state at the start."""
        return first(oracle, theta)

    def advance(self, oracle: Estimator, state: Ascent) -> Ascent:
        """Return the next state."""
        theta = moved(state.theta, state.direction, power(self.step, self.exponent, state.num), self.normalized)
        weight = power(self.momentum, self.momentum_power, state.num + 1)
        share = float(torch.rand((), generator=oracle.generator, device=oracle.generator.device))
        between = share * theta + (1 - share) * state.theta
        carried = oracle.hessian_vector(between, oracle.sample(between), theta - state.theta)
        trajectories = oracle.sample(theta)
        fresh = oracle.gradient(theta, trajectories)
        direction = (1 - weight) * (state.direction + carried) + weight * fresh
        return state_of(oracle, theta, state.theta, direction, state.num + 1, trajectories)
