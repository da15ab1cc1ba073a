"""The box of the search and the first particles in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError


@dataclass(frozen=True)
class Box:
    """Lower and upper bounds (d,), infinite where there is none; particles are moved to the nearest point inside."""

    low: Tensor
    high: Tensor
    is_numpy: bool

    @classmethod
    def of(cls, bounds: Any, x0: Any) -> Box:
        """Read pairs (low, high), an array of shape (d, 2), or scipy's `Bounds`; without bounds, `x0` gives dimension and type."""
        if bounds is None and x0 is None:
            raise UserError("bounds or x0 are needed; got neither; say where to search: bounds=[(low, high), …]")
        like = (
            (x0 if isinstance(x0, Tensor) else torch.as_tensor(np.asarray(x0))) if x0 is not None else torch.zeros(())
        )
        if x0 is None or not like.is_floating_point():
            like = like.to(torch.float64)
        is_numpy = isinstance(x0, np.ndarray) or isinstance(bounds, np.ndarray) or hasattr(bounds, "lb")
        if bounds is None:
            low, high = torch.full_like(like, -torch.inf), torch.full_like(like, torch.inf)
        else:
            low, high = _pairs(bounds, like if x0 is not None else None).unbind(1)
        if low.ndim != 1 or not (low < high).all() or (x0 is not None and like.shape != low.shape):
            raise UserError(
                "bounds with low < high, one pair for each entry of x0, are needed; "
                f"got {bounds!r} and x0 of shape {tuple(like.shape)}; mend them"
            )
        return cls(low, high, is_numpy)

    def inside(self, particles: Tensor) -> Tensor:
        """Return the nearest points of the box."""
        return particles.clamp(self.low, self.high)

    def centre(self, x0: Any) -> Tensor:
        """Return `x0`, or the middle of the box."""
        if x0 is not None:
            return torch.as_tensor(x0).to(self.low)
        self._need_finite()
        return (self.low + self.high) / 2

    def sample(self, x0: Any, spread: float | None, num: int, generator: torch.Generator) -> Tensor:
        """Return the first particles: normal around `x0` with standard deviation `spread`, else uniform in the box."""
        shape = (num, len(self.low))
        if x0 is not None and spread is not None:
            normal = torch.randn(shape, generator=generator, dtype=self.low.dtype, device=self.low.device)
            return self.inside(self.centre(x0) + spread * normal)
        self._need_finite()
        uniform = torch.rand(shape, generator=generator, dtype=self.low.dtype, device=self.low.device)
        return self.low + (self.high - self.low) * uniform

    def _need_finite(self) -> None:
        if not (torch.isfinite(self.low).all() and torch.isfinite(self.high).all()):
            raise UserError("finite bounds, or x0 with spread, are needed to start from; got infinite bounds; give one")


def _pairs(bounds: Any, like: Tensor | None) -> Tensor:
    if hasattr(bounds, "lb"):
        bounds = np.stack(np.broadcast_arrays(bounds.lb, bounds.ub), axis=-1)
    try:
        if isinstance(bounds, Sequence):
            bounds = [(_end(low, -torch.inf), _end(high, torch.inf)) for low, high in bounds]
        pairs = torch.as_tensor(bounds, dtype=None if isinstance(bounds, Tensor) else torch.float64)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
            raise ValueError(f"an array of shape {tuple(pairs.shape)}")
    except (TypeError, ValueError) as error:
        raise UserError(f"bounds as pairs (low, high) are needed; got {error}; give a pair per dimension") from error
    if like is not None:
        return pairs.to(like)
    return pairs if pairs.is_floating_point() else pairs.to(torch.float64)


def _end(end: float | None, missing: float) -> float:
    return missing if end is None else float(end)
