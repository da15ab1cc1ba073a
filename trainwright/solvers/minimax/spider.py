"""SPIDER-GDA: descent ascent on recursive gradient estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .reduced import _Reduced


@dataclass(frozen=True)
class SpiderGDA(_Reduced):
    """SPIDER-GDA for min over x, max over y of (1/n) Σᵢ fᵢ(x, y), f PL in x and −f PL in y (Polyak–Łojasiewicz).

    Every `period` steps the gradient is computed in full; between, with fresh batches Sₓ and Sᵧ drawn with replacement,

        Gₓ ← Gₓ + mean over Sₓ of [∇ₓfᵢ(xₖ, yₖ) − ∇ₓfᵢ(xₖ₋₁, yₖ₋₁)], Gᵧ alike with Sᵧ;  x ← x − step_x Gₓ, y ← y + step_y Gᵧ.

    After `num_inner` steps the loop starts anew from one of its iterates drawn uniformly.

    `step_x`, `step_y`: step sizes, positive. `batch_size` B: components a batch. `period` M: steps between two full
    gradients (default: the number of components n). `num_inner` K: steps an inner loop (default: `period`).
    `output_rule`: "uniform" as in the paper, or "last" as in the authors' code: half the steps are then not lost.
    `batches`: "independent" for x and y as in the paper, or "shared" as in the authors' code (half the work where
    one call gives both gradients). A step takes 2 B oracle calls, and n where the gradient is computed in full.

    `theory.spider` gives the constants of the proof: M = B = √n, but K ≈ 1.6e7 κₓκᵧ², of no practical use. What bounds the
    steps at B = 1 is the largest smoothness of a *component*, not of f. It need not beat `SVRGGDA` in practice: the
    theory's gain is n^(1/6), and at equal calls either may win. Memory: four times (x, y).

    Source: Chen, Yao, Luo, Faster Stochastic Algorithms for Minimax Optimization under Polyak–Łojasiewicz Conditions,
    NeurIPS 2022 (arXiv 2307.15868), algorithm 1. The authors' code differs in the points named above, and counts one
    call a step where two are made.

    >>> SpiderGDA(step_x=1e-2, step_y=1e-1, batch_size=8, period=64).check_every(num_components=1000)
    64
    """

    recursive: ClassVar[bool] = True
