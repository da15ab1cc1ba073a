"""Sketched solution of a square system K z = b, one random row action after another: Kaczmarz and Gaussian sketches.

    Kaczmarz  z ← z − (r_i / ‖K_i‖²) K_i,               i uniform over the rows
    Gaussian  z ← z − (Sᵀr / ‖KᵀS‖²) KᵀS,               S ~ N(0, I)
    blocks    z ← z − KᵀS (SᵀKKᵀS)⁺ Sᵀr                  several at once (`size` > 1)

with r = K z − b. A run of s such steps is the forward substitution with the lower triangle of Sᵀ K Kᵀ S: `_Chunk`
does s steps in four products, and the result is that of the steps done one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import linalg

Array = np.ndarray
Sketch = Literal["kaczmarz", "gaussian", "exact"]
CHUNK = 64
ROUNDING = 4 * float(np.finfo(np.float64).eps)
CHUNKS_BETWEEN_RESIDUALS = 50
"""The residual is updated, and computed anew this often, so that rounding does not gather in it."""


@dataclass
class SketchedSystem:
    """K (N, N) symmetric, b (N,), and where the solution stands; `advance` goes on from there."""

    matrix: Array
    right: Array
    sketch: Sketch
    size: int
    random: np.random.Generator

    def __post_init__(self) -> None:
        self.z = np.zeros_like(self.right)
        self.residual = -self.right
        self.num_steps = 0
        self.norm = float(np.linalg.norm(self.matrix))
        if self.sketch == "kaczmarz":
            self.gram = self.matrix @ self.matrix.T
            self.rows = np.flatnonzero(self.gram.diagonal() > 0)

    def advance(self, tolerance: float, most_steps: int) -> bool:
        """Step until ‖K z − b‖ ≤ tolerance, or rounding's size (True), or `most_steps` sketches are spent (False)."""
        if self.sketch == "exact":
            return self._solve_exactly()
        chunks = 0
        while self.num_steps < most_steps:
            if self._meets(tolerance):
                self.residual = self.matrix @ self.z - self.right
                if self._meets(tolerance):
                    return True
            self._chunk()
            chunks += 1
            if chunks % CHUNKS_BETWEEN_RESIDUALS == 0:
                self.residual = self.matrix @ self.z - self.right
        self.residual = self.matrix @ self.z - self.right
        return self._meets(tolerance)

    def _meets(self, tolerance: float) -> bool:
        rounding = ROUNDING * (self.norm * float(np.linalg.norm(self.z)) + float(np.linalg.norm(self.right)))
        return bool(np.linalg.norm(self.residual) <= max(tolerance, rounding))

    def _solve_exactly(self) -> bool:
        """One direct solution: the inexact method's exact limit, for comparison and for ill-conditioned K."""
        self.z = linalg.solve(self.matrix, self.right, assume_a="sym")
        self.residual = self.matrix @ self.z - self.right
        return True

    def _chunk(self) -> None:
        count = CHUNK if self.size == 1 else self.size
        if self.sketch == "kaczmarz":
            rows = self.random.choice(self.rows, count, replace=self.size == 1 or count > self.rows.size)
            actions, images = self.matrix[rows], self.gram[rows]
            gram, right = images[:, rows], self.residual[rows]
        else:
            sketch = self.random.standard_normal((count, self.right.size))
            actions = sketch @ self.matrix.T
            images = actions @ self.matrix.T
            gram, right = actions @ actions.T, sketch @ self.residual
        weights = self._weights(gram, right)
        self.z -= actions.T @ weights
        self.residual = self.residual - images.T @ weights
        self.num_steps += count

    def _weights(self, gram: Array, right: Array) -> Array:
        if self.size == 1:
            return np.asarray(linalg.solve_triangular(gram, right, lower=True, check_finite=False))
        return np.asarray(linalg.lstsq(gram, right, check_finite=False)[0])
