"""Consensus-based optimisation: particles drift to a weighted mean and diffuse with their distance from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...artifacts import UserError
from .box import Box
from .ensemble import Ensemble


@dataclass(frozen=True)
class CBO:
    """Consensus-based optimisation of E: ℝᵈ → ℝ from values alone, by Euler–Maruyama steps of N particles Xⁱ,

        Xⁱ ← Xⁱ − drift dt (Xⁱ − x_α) + noise √dt D(Xⁱ − x_α) ξⁱ,  ξⁱ ~ N(0, I),

    x_α their `consensus_point`; D(z) = diag(z) ("anisotropic") or ‖z‖ I ("isotropic"). The result is x_α.

    `drift` λ and `noise` σ, both > 0 and ≥ 0; `dt`: step of time, with drift dt ≤ 1; `alpha`: inverse temperature in units of
    1/E; `order`: "drift-first" (the diffusion uses the drifted particles, as the authors' code) or "textbook" (the old ones).
    `renoise`: where the spread falls under `renoise_below`, particles get normal noise of that size (0: never).

    The isotropic noise grows with √d: theory asks for 2 λ > d σ², anisotropic 2 λ > σ²; practice does well beyond (the
    defaults are such a choice, found on multimodal functions in up to 10 dimensions), so neither is enforced. The ensemble
    collapses near the minimum, not at it (some hundredths of the box; small noise collapses it anywhere): polish
    `best_x` with a local method. E's scale matters: alpha times the differences of E that
    should count must be above 1. Not when gradients are at hand and E has one valley, nor much above 10
    dimensions with few hundred particles: there CMA-ES and its kin need fewer evaluations.

    Source: Riedl, Klock, Geldhauser, Fornasier, Gradient is All You Need?, 2023 (arXiv 2306.09778), and the authors' code.

    >>> from trainwright.solvers.consensus import minimize
    >>> result = minimize(lambda x: ((x - 1) ** 2).sum(1), [(-4.0, 4.0)] * 3, max_iterations=500, seed=1)
    >>> bool((result.x - 1).abs().max() < 0.1)
    True
    """

    drift: float = 1.0
    noise: float = 5.1
    dt: float = 0.01
    alpha: float = 30.0
    diffusion: Literal["anisotropic", "isotropic"] = "anisotropic"
    order: Literal["drift-first", "textbook"] = "drift-first"
    renoise: float = 0.0
    renoise_below: float = 1e-3

    def __post_init__(self) -> None:
        if not (self.drift > 0 and self.dt > 0 and self.drift * self.dt <= 1):
            raise UserError(
                f"drift > 0, dt > 0 and drift dt ≤ 1 are needed; got {self.drift} and {self.dt}; start with 1 and 0.01"
            )
        if not (self.noise >= 0 and self.alpha >= 0 and self.renoise >= 0 and self.renoise_below >= 0):
            raise UserError(
                "noise, alpha, renoise and renoise_below of at least 0 are needed; "
                f"got {self.noise}, {self.alpha}, {self.renoise}, {self.renoise_below}; start with 5.1, 30, 0, 0"
            )
        if self.diffusion not in ("anisotropic", "isotropic") or self.order not in ("drift-first", "textbook"):
            raise UserError(
                "diffusion 'anisotropic' or 'isotropic' and order 'drift-first' or 'textbook' are needed; "
                f"got {self.diffusion!r} and {self.order!r}; give one of these"
            )

    def first(self, box: Box, x0: Any, spread: float | None, num: int, generator: torch.Generator) -> Tensor:
        """Return the particles of the first evaluation."""
        return box.sample(x0, spread, num, generator)

    def propose(self, ensemble: Ensemble, generator: torch.Generator) -> Tensor:
        """Return the particles after one step of time."""
        old = ensemble.particles - ensemble.consensus
        drifted = (1 - self.drift * self.dt) * old
        base = drifted if self.order == "drift-first" else old
        size = base if self.diffusion == "anisotropic" else base.norm(dim=1, keepdim=True)
        moved = drifted.addcmul(size, _normal(old, generator), value=self.noise * self.dt**0.5)
        if self.renoise > 0 and ensemble.spread < self.renoise_below:
            moved = moved + self.renoise * _normal(old, generator)
        return moved.add_(ensemble.consensus)

    @property
    def has_residual(self) -> bool:
        return True

    def residual(self, ensemble: Ensemble) -> float:
        """Return how far the ensemble is from agreeing: its spread."""
        return ensemble.spread


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
