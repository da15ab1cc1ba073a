"""What the policy-gradient methods share: the state, the schedules, the step along a direction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ...artifacts import UserError
from .estimators import Estimator
from .rollout import Trajectories


@dataclass(frozen=True)
class Ascent:
    """θₜ with the direction dₜ found there, θₜ₋₁, the number t, and the mean returns of the last batch."""

    theta: Tensor
    previous: Tensor
    direction: Tensor
    num: int
    discounted: float
    undiscounted: float


@runtime_checkable
class Method(Protocol):
    """Any method that climbs by estimates of the policy gradient."""

    def start(self, oracle: Estimator, theta: Tensor) -> Ascent:
        """Return the state with the first direction."""

    def advance(self, oracle: Estimator, state: Ascent) -> Ascent:
        """Return the state after one step along the direction, with the next one."""


def power(initial: float, exponent: float, num: int) -> float:
    """Return initial · (2/(t + 2))^exponent.

    >>> power(0.5, 1.0, 0), power(0.5, 1.0, 2)
    (0.5, 0.25)
    """
    return initial * (2 / (num + 2)) ** exponent


def moved(theta: Tensor, direction: Tensor, step: float, normalized: bool) -> Tensor:
    """Return θ + step d, or θ + step d/‖d‖."""
    length = direction.norm() + 1e-12 if normalized else 1.0
    return theta + (step / length) * direction


def state_of(
    oracle: Estimator, theta: Tensor, previous: Tensor, direction: Tensor, num: int, trajectories: Trajectories
) -> Ascent:
    """Return the state, and let the baseline learn from the batch, which no estimate needs any more."""
    oracle.learn_baseline(trajectories)
    discounted, plain = (float(trajectories.returns(discount).mean()) for discount in (oracle.discount, 1.0))
    return Ascent(theta, previous, direction, num, discounted, plain)


def first(oracle: Estimator, theta: Tensor) -> Ascent:
    """Return the state at the start: d₀ is a plain estimate of the gradient at θ₀."""
    trajectories = oracle.sample(theta)
    return state_of(oracle, theta, theta, oracle.gradient(theta, trajectories), 0, trajectories)


def check(step: float, momentum: float) -> None:
    """Refuse a step that is not positive, and a weight of new estimates outside (0, 1]."""
    if not (0 < step < math.inf and 0 < momentum <= 1):
        raise UserError(f"step > 0 and momentum in (0, 1] are needed; got {step} and {momentum}; start with 0.5 and 1")
