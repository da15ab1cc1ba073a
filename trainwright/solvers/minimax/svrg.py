"""SVRG-GDA: descent ascent with control variates from a snapshot; the baseline of SPIDER-GDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .reduced import _Reduced


@dataclass(frozen=True)
class SVRGGDA(_Reduced):
    """SVRG-GDA: as `SpiderGDA`, but each difference is taken to the point of the last full gradient,

        Gₓ = ∇ₓf(x_ref, y_ref) + mean over Sₓ of [∇ₓfᵢ(xₖ, yₖ) − ∇ₓfᵢ(x_ref, y_ref)], Gᵧ alike with Sᵧ.

    Unbiased, where SPIDER's estimate is not; its error grows with the distance from the snapshot. Same arguments and
    counts as `SpiderGDA`; the theory takes a batch of 1 and a period of the order n. At equal calls it is often as good.

    Source: Yang, Kiyavash, He, Global Convergence and Variance Reduction for a Class of Nonconvex-Nonconcave Minimax
    Problems, NeurIPS 2020, with simultaneous in place of alternating steps.

    >>> SVRGGDA(step_x=1e-2, step_y=1e-1).restart_length(num_components=1000)
    1000
    """

    recursive: ClassVar[bool] = False
