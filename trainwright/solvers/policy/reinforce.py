"""REINFORCE, plain and with normalised momentum: the baselines of the family."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .ascent import Ascent, check, first, moved, power, state_of
from .estimators import Estimator


@dataclass(frozen=True)
class REINFORCE:
    """θₜ₊₁ = θₜ + γₜ dₜ, dₜ = (1 − ηₜ) dₜ₋₁ + ηₜ g(θₜ, τₜ), g the policy-gradient estimate; divided by ‖dₜ‖ where `normalized`.

    γₜ = step (2/(t+2))^step_power; ηₜ = momentum (2/(t+2))^momentum_power, 1 being no momentum. One batch an iteration.
    Tuned, it is hard to beat on small problems; its proven rate is ε⁻³ and more, against ε⁻²·⁵ and ε⁻² of the others here.

    Source: Williams, Machine Learning 8 (1992); with normalised momentum: Cutkosky and Mehta, ICML 2020.

    >>> REINFORCE(step=0.1)
    REINFORCE(step=0.1, momentum=1.0, step_power=0.0, momentum_power=0.0, normalized=False)
    """

    step: float
    momentum: float = 1.0
    step_power: float = 0.0
    momentum_power: float = 0.0
    normalized: bool = False

    def __post_init__(self) -> None:
        check(self.step, self.momentum)

    def start(self, oracle: Estimator, theta: Tensor) -> Ascent:
        """Return the state at the start."""
        return first(oracle, theta)

    def advance(self, oracle: Estimator, state: Ascent) -> Ascent:
        """Return the next state."""
        theta = moved(state.theta, state.direction, power(self.step, self.step_power, state.num), self.normalized)
        weight = power(self.momentum, self.momentum_power, state.num + 1)
        trajectories = oracle.sample(theta)
        direction = (1 - weight) * state.direction + weight * oracle.gradient(theta, trajectories)
        return state_of(oracle, theta, state.theta, direction, state.num + 1, trajectories)
