"""A stream of systems as it comes up in practice: the steps of the heat equation under a coefficient that changes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import sparse

from ...artifacts import check_range
from ..seeds import as_numpy_generator
from .grid import PoissonGrid
from .system import LinearResult


class HeatStream:
    """The steps of Crank and Nicolson for ∂u/∂t = κ(t) Δu on the unit square, u = 0 at its edge, one system a step:

        (I + ½ κ dt L/h²) u ← (I − ½ κ dt L/h²) u,   L the 5-point Laplacian on side² points, h = 1/(side + 1),
        κ(t) = max(0.1 sin 2πt, −10 sin 2πt) at the middle of the step.

    Iterate for (matrix, right-hand side, context) and hand each solution back by `take`, as `solve_stream(heat, tuner,
    on_result=heat.take)` does; a system is made when it is asked for, from the solution before. The context is the stiffness
    κ dt/h² on the scale log10(1 + ·), in [0, `highest_context`]: what the best ω hangs on. A period of κ is
    `num_steps` / `end` steps.

    num_steps: T, over times 0 to `end`. The first u is a sine wave with noise of `seed` (a number or a NumPy generator). Raises
    `UserError` for numbers out of range.

    >>> from trainwright.solvers.linear import TsallisINF, solve_ssor_pcg, solve_stream
    >>> heat = HeatStream(side=8, num_steps=6)
    >>> solve_stream(heat, TsallisINF(), solve=solve_ssor_pcg, on_result=heat.take).num_failed
    0

    Source: Khodak et al., *Learning to Relax*, ICLR 2024, whose experiment it is.
    """

    def __init__(
        self, side: int = 25, num_steps: int = 5000, end: float = 5.0, seed: int | np.random.Generator = 0
    ) -> None:
        check_range(
            "HeatStream",
            side=(side, "of at least 2", lambda value: value >= 2),
            num_steps=(num_steps, "of at least 1", lambda value: value >= 1),
            end=(end, "above 0", lambda value: value > 0),
        )
        self.side, self.num_steps, self.dt = side, num_steps, end / num_steps
        self.laplacian = PoissonGrid((side, side)).matrix() * (side + 1) ** 2
        wave = np.sin(math.pi * np.arange(1, side + 1) / (side + 1))
        noise = as_numpy_generator(seed).normal(size=side**2)
        self.u = np.outer(wave, wave).ravel() + 0.1 * noise

    def __len__(self) -> int:
        return self.num_steps

    @property
    def highest_context(self) -> float:
        """The upper end of the contexts; the lower is 0."""
        return self._context(10.0)

    def __iter__(self) -> Iterator[tuple[sparse.csr_array, np.ndarray, float]]:
        eye = sparse.eye_array(self.side**2)
        for step in range(self.num_steps):
            coefficient = heat_coefficient((step + 0.5) * self.dt)
            half = 0.5 * coefficient * self.dt * self.laplacian
            yield sparse.csr_array(eye + half), np.asarray(self.u - half @ self.u), self._context(coefficient)

    def take(self, result: LinearResult) -> None:
        """Go on from this solution."""
        self.u = np.asarray(result.x, dtype=np.float64)

    def _context(self, coefficient: float) -> float:
        return math.log10(1 + coefficient * self.dt * (self.side + 1) ** 2)


def heat_coefficient(time: float) -> float:
    """Return κ(t) = max(0.1 sin 2πt, −10 sin 2πt): small in the first half of each period, large in the second.

    >>> heat_coefficient(0.25), heat_coefficient(0.75)
    (0.1, 10.0)
    """
    wave = math.sin(2 * math.pi * time)
    return float(max(0.1 * wave, -10 * wave))
