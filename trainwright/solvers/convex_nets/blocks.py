r"""ADMM's first step for losses without a closed form: randomised block coordinate descent with a line search.

Of   loss(F u) + (ρ/2) (‖u - v + λ‖² + ‖G u - s + ν‖²),   a block u_i at a time, the output F u kept up to date. The direction
is the gradient through (I + X'X)⁻¹, which is the quadratic part's own curvature: as cheap, and no worse for scaled features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics.linesearch import armijo
from . import losses
from .gates import Gates, InverseSystem

_WINDOW = 10


class BlockDescent:
    """`minimise(u, centre, margins)`: the sum above with centre = v - λ and margins = s - ν, from u."""

    def __init__(
        self, gates: Gates, system: InverseSystem, y: Tensor, loss: str, rho: float, tolerance: float,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.gates, self.system, self.y, self.loss, self.rho = gates, system, y, loss, rho
        self.tolerance, self.generator = tolerance, generator

    def minimise(self, u: Tensor, centre: Tensor, margins: Tensor) -> tuple[Tensor, int]:
        """Return the new u and how many blocks were stepped; at most one pass over the blocks."""
        u = u.clone()
        output, blocks = self.gates.output(u), u.shape[0] * u.shape[1]
        drops: list[float] = []
        order = torch.randperm(blocks, generator=self.generator, device=u.device)
        for place in order.tolist():
            half, block = divmod(place, u.shape[1])
            drop, output = self._step(u, half, block, centre, margins, output)
            drops.append(drop)
            if len(drops) >= max(_WINDOW, blocks // 2) and sum(drops[-_WINDOW:]) / _WINDOW < self.tolerance:
                break
        return u, len(drops)

    def _step(
        self, u: Tensor, half: int, block: int, centre: Tensor, margins: Tensor, output: Tensor
    ) -> tuple[float, Tensor]:
        X, passes, signs = self.gates.X, self.gates.passes[:, block], self.gates.signs[:, block]
        sign = 1.0 - 2.0 * half
        off = u[half, block] - centre[half, block]
        gap = signs * (X @ u[half, block]) - margins[half, :, block]
        pull = sign * passes * losses.slope(self.loss, output, self.y) + self.rho * signs * gap
        gradient = X.T @ pull + self.rho * off
        direction = -self.system.block_solve(gradient[None])[0] / self.rho
        slope = float(gradient @ direction)
        if not slope < 0.0:
            return 0.0, output
        moved = X @ direction
        change, turn = sign * passes * moved, signs * moved
        start = float(losses.value(self.loss, output, self.y))
        linear = self.rho * float(off @ direction + gap @ turn)
        curve = self.rho / 2 * float(direction @ direction + turn @ turn)

        def drop_at(step: float) -> float:
            now = float(losses.value(self.loss, output + step * change, self.y))
            return now - start + step * (linear + step * curve)

        found = armijo(drop_at, 0.0, slope, step=1.0, max_trials=40)
        if not found.accepted:
            return 0.0, output
        u[half, block] += found.step * direction
        return -found.value, output + found.step * change
