"""N-PG-IGT: normalised policy gradient with implicit gradient transport."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .ascent import Ascent, check, first, moved, power, state_of
from .estimators import Estimator


@dataclass(frozen=True)
class NPGIGT:
    """N-PG-IGT: momentum whose new gradient is taken ahead of the iterate, so that the average stands for the iterate itself:

        θ̃ₜ = θₜ + ((1 − ηₜ)/ηₜ)(θₜ − θₜ₋₁), τₜ drawn under θ̃ₜ,
        dₜ = (1 − ηₜ) dₜ₋₁ + ηₜ g(θ̃ₜ, τₜ),  θₜ₊₁ = θₜ + γₜ dₜ/‖dₜ‖;

    γₜ = step (2/(t+2))^step_power, ηₜ = momentum (2/(t+2))^momentum_power; d₀ = g(θ₀, τ₀).

    One batch an iteration, no Hessian and no importance weights; three vectors. Õ(ε⁻²·⁵) trajectories for Fisher-non-degenerate
    policies. With the default powers θ travels 2 step log T in all: `step` must be of the order of the way there (0.1
    freezes). The way ahead, (1 − η)/η γ, can leave the sane region early: keep `momentum` 1, or limit it by `max_ahead`
    (‖θ̃ₜ − θₜ‖, in units of θ). On small problems a tuned `REINFORCE` is as good.

    Source: Fatkhullin, Barakat, Kireeva, He, Stochastic Policy Gradient Methods: Improved Sample Complexity for
    Fisher-non-degenerate Policies, ICML 2023 (arXiv 2302.01734). Their code takes 1000 and more steps an estimate; so may you.

    >>> NPGIGT(step=0.5).momentum_power
    0.8
    """

    step: float
    momentum: float = 1.0
    step_power: float = 1.0
    momentum_power: float = 0.8
    max_ahead: float | None = None

    def __post_init__(self) -> None:
        check(self.step if self.max_ahead is None else min(self.step, self.max_ahead), self.momentum)

    def start(self, oracle: Estimator, theta: Tensor) -> Ascent:
        """Return the state at the start."""
        return first(oracle, theta)

    def advance(self, oracle: Estimator, state: Ascent) -> Ascent:
        """Return the next state."""
        theta = moved(state.theta, state.direction, power(self.step, self.step_power, state.num), normalized=True)
        weight = power(self.momentum, self.momentum_power, state.num + 1)
        way = (1 - weight) / weight * (theta - state.theta)
        if self.max_ahead is not None:
            way = way * min(1.0, self.max_ahead / (float(way.norm()) + 1e-12))
        trajectories = oracle.sample(theta + way)
        direction = (1 - weight) * state.direction + weight * oracle.gradient(theta + way, trajectories)
        return state_of(oracle, theta, state.theta, direction, state.num + 1, trajectories)
