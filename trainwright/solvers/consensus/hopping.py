"""Consensus hopping: sample around a point, move to the consensus of the sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...artifacts import UserError
from .box import Box
from .ensemble import Ensemble


@dataclass(frozen=True)
class ConsensusHopping:
    """Consensus hopping: xₖ = x_α(X¹ … Xᴺ) with Xⁱ = xₖ₋₁ + noise ξⁱ, ξⁱ ~ N(0, I); x_α is the `consensus_point`.

    In the limit of many particles a stochastic proximal step, xₖ ≈ argmin E + ‖x − xₖ₋₁‖²/(2 τ) with τ = alpha noise²:
    gradient descent from values alone that can leave shallow valleys.

    `noise` σ: size of a hop, in units of x. `alpha`: inverse temperature in units of 1/E. `decay`, `decay_every`: the
    noise is multiplied by `decay` every so many steps (the authors' code: 0.98 and 100; default: constant).

    The weights collapse onto one particle where alpha σ ‖∇E‖ exceeds about √(2 log N): steps are then far shorter than the
    proximal ones; take more particles, or a smaller alpha. It has no spread to hold a tolerance against: limit its iterations.

    Source: Riedl, Klock, Geldhauser, Fornasier, Gradient is All You Need?, 2023 (arXiv 2306.09778), and the authors' code.

    >>> from trainwright.solvers.consensus import minimize
    >>> method = ConsensusHopping(noise=0.5, alpha=10.0)
    >>> x0 = torch.tensor([3.0, -2.0])
    >>> result = minimize(lambda x: (x**2).sum(1), x0=x0, method=method, max_iterations=60)
    >>> bool(result.x.norm() < 0.3)
    True
    """

    noise: float = 0.4
    alpha: float = 100.0
    decay: float = 1.0
    decay_every: int = 100

    def __post_init__(self) -> None:
        if not (self.noise > 0 and self.alpha >= 0 and 0 < self.decay <= 1 and self.decay_every >= 1):
            raise UserError(
                "noise > 0, alpha ≥ 0, decay in (0, 1] and decay_every ≥ 1 are needed; "
                f"got {self.noise}, {self.alpha}, {self.decay}, {self.decay_every}; start with 0.4, 100, 1, 100"
            )

    def first(self, box: Box, x0: Any, spread: float | None, num: int, generator: torch.Generator) -> Tensor:
        """Return the particles of the first evaluation: a sample around `x0`, or the middle of the box."""
        return self._around(box.centre(x0), num, 0, generator)

    def propose(self, ensemble: Ensemble, generator: torch.Generator) -> Tensor:
        """Return a sample around the consensus."""
        return self._around(ensemble.consensus, len(ensemble.particles), ensemble.nit + 1, generator)

    @property
    def has_residual(self) -> bool:
        return False

    def residual(self, ensemble: Ensemble) -> float:
        """Return NaN: the sample's spread says nothing about the distance from a minimum."""
        return math.nan

    def _around(self, centre: Tensor, num: int, nit: int, generator: torch.Generator) -> Tensor:
        noise = self.noise * self.decay ** (nit // self.decay_every)
        steps = torch.randn(num, len(centre), generator=generator, dtype=centre.dtype, device=centre.device)
        return centre + noise * steps
