"""Particles with their values and their consensus point: what the methods of the family move.

x_α = Σᵢ wᵢ Xⁱ / Σᵢ wᵢ,  wᵢ = exp(−α (E(Xⁱ) − minⱼ E(Xʲ)))        `consensus_point`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...artifacts import UserError
from .box import Box


def consensus_point(particles: Tensor, values: Tensor, alpha: float) -> Tensor:
    """Return the Gibbs-weighted mean of the particles, x_α = Σ wᵢ Xⁱ / Σ wᵢ with wᵢ = exp(−alpha (values_i − min values)).

    `particles` (N, d), `values` (N,), `alpha` ≥ 0 in units of 1/value: 0 is the mean, ∞ the best particle. A particle
    whose value is not finite has no weight; where none is finite, all weigh the same. Returns (d,).

    >>> particles = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    >>> consensus_point(particles, torch.tensor([1e9, 1e9]), alpha=30.0)
    tensor([1., 2.])
    """
    values = torch.where(torch.isfinite(values), values, torch.inf)
    lowest = values.min()
    if not torch.isfinite(lowest):
        return particles.mean(0)
    weights = torch.exp(-alpha * (values - lowest))
    return (weights / weights.sum()) @ particles


@dataclass(frozen=True)
class Ensemble:
    """The particles (N, d) with their values (N,), what follows from them, and the best point met so far."""

    particles: Tensor
    values: Tensor
    consensus: Tensor
    nit: int
    best_x: Tensor
    best_fun: float

    @classmethod
    def of(cls, particles: Tensor, values: Tensor, alpha: float, before: Ensemble | None) -> Ensemble:
        """Return the ensemble that follows `before`; values that are not finite count as +∞."""
        values = torch.where(torch.isfinite(values), values, torch.inf)
        place = int(values.argmin())
        best_x, best_fun = particles[place].clone(), float(values[place])
        if before is not None and before.best_fun <= best_fun:
            best_x, best_fun = before.best_x, before.best_fun
        nit = 0 if before is None else before.nit + 1
        return cls(particles, values, consensus_point(particles, values, alpha), nit, best_x, best_fun)

    @property
    def spread(self) -> float:
        """The root mean square distance of the particles from the consensus."""
        return float((self.particles - self.consensus).square().sum(1).mean().sqrt())


@runtime_checkable
class Method(Protocol):
    """Any method that moves particles by what is known of them."""

    @property
    def alpha(self) -> float:
        """Return how sharply the consensus point prefers low values, in units of 1/value."""

    @property
    def has_residual(self) -> bool:
        """Return whether a tolerance can end it."""

    def first(self, box: Box, x0: Any, spread: float | None, num: int, generator: torch.Generator) -> Tensor:
        """Return the particles [num, d] of the first evaluation."""

    def propose(self, ensemble: Ensemble, generator: torch.Generator) -> Tensor:
        """Return the particles to evaluate next."""

    def residual(self, ensemble: Ensemble) -> float:
        """Return how far from the end the ensemble is; NaN where that cannot be said."""


def check_values(values: Tensor, particles: Tensor) -> Tensor:
    """Return `values` where it is one real number a particle."""
    if values.shape != particles.shape[:1] or values.is_complex():
        raise UserError(
            f"one value per particle, of shape ({len(particles)},), is needed; got {tuple(values.shape)} of {values.dtype}; "
            "evaluate the rows of the (N, d) batch, or say vectorized=False"
        )
    return values.to(dtype=particles.dtype, device=particles.device)
