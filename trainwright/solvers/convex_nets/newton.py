r"""ADMM's first step for losses without a closed form, exactly: Newton's method in the n outputs.

With M = I + G'G and c = M⁻¹(v - λ + G'(s - ν)), the minimiser of   loss(F u) + (ρ/2) (u - c)'M(u - c)   is
u = c - M⁻¹F'g/ρ for the n slopes g = loss'(F u). So   φ(g) = loss(z) + g'K g/(2ρ),   z = F c - K g/ρ,   K = F M⁻¹F'   is
minimised, with K made once: the Newton direction solves (I + H K/ρ) δ = loss'(z) - g, H the loss's second derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics.linesearch import armijo
from . import losses
from .gates import Gates, InverseSystem

_MAX_STEPS = 30


class OutputNewton:
    """`minimise(u, centre, margins)`: the sum above with centre = v - λ and margins = s - ν, from u's outputs."""

    def __init__(self, gates: Gates, system: InverseSystem, y: Tensor, loss: str, rho: float, tolerance: float) -> None:
        self.gates, self.system, self.y, self.loss, self.rho, self.tolerance = gates, system, y, loss, rho, tolerance
        self.kernel = 2 * system.kernel() / rho

    def minimise(self, u: Tensor, centre: Tensor, margins: Tensor) -> tuple[Tensor, int]:
        """Return the new u and how many Newton steps it took."""
        middle = self.system.block_solve(centre + self.gates.margins_adjoint(margins))
        base = self.gates.output(middle)
        slopes = losses.slope(self.loss, self.gates.output(u), self.y)
        num_steps = 0
        while num_steps < _MAX_STEPS:
            output = base - self.kernel @ slopes
            apart = losses.slope(self.loss, output, self.y) - slopes
            if float(apart.norm()) <= self.tolerance * len(self.y) ** 0.5:
                break
            slopes, moved = self._step(slopes, base, output, apart)
            num_steps += 1
            if not moved:
                break
        return middle - self.system.block_solve(self.gates.output_adjoint(slopes)) / self.rho, num_steps

    def _step(self, slopes: Tensor, base: Tensor, output: Tensor, apart: Tensor) -> tuple[Tensor, bool]:
        bends = losses.curvature(self.loss, output, self.y)
        system = torch.eye(len(bends), dtype=bends.dtype, device=bends.device) + bends[:, None] * self.kernel
        direction = torch.linalg.solve(system, apart)
        descent = -float(apart @ (self.kernel @ direction))
        if not descent < 0.0:
            return slopes, False
        start = self._value(slopes, base)
        if -descent < 1e-11 * abs(start):  # below what rounding lets a line search see: one last full step
            return slopes + direction, False
        found = armijo(lambda step: self._value(slopes + step * direction, base) - start, 0.0, descent, step=1.0)
        return (slopes + found.step * direction, True) if found.accepted else (slopes, False)

    def _value(self, slopes: Tensor, base: Tensor) -> float:
        pulled = self.kernel @ slopes
        return float(losses.value(self.loss, base - pulled, self.y) + slopes @ pulled / 2)
