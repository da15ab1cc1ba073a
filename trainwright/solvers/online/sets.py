"""The sets that learners play in: projections in the Euclidean norm and in the norm of a matrix.

Points are the last dimension; leading dimensions are independent players, projected each for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError
from .metric import project_in


class ConvexSet(Protocol):
    """A bounded convex set: its Euclidean diameter, a point inside, and projections onto it."""

    @property
    def diameter(self) -> float:
        """The largest distance between two of its points."""

    @property
    def centre(self) -> Tensor:
        """A point of the set (d,), where learners begin."""

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest points, (…, d) → (…, d)."""

    def project_in(self, metric: Tensor, x: Tensor) -> Tensor:
        """Return argmin over the set of (z − x)'H(z − x), H = `metric` (…, d, d) positive definite."""


@dataclass(frozen=True)
class Ball:
    """{x: ‖x − centre‖ ≤ radius}; `centre` a tensor (d,), or the dimension d for the origin in float64.

    >>> Ball(2, radius=5.0).project(torch.tensor([6.0, 8.0]))
    tensor([3., 4.])
    """

    centre: Any
    radius: float = 1.0

    def __post_init__(self) -> None:
        _set(self, "centre", _point(self.centre, 0.0))
        if not 0 < self.radius < math.inf:
            raise UserError(f"a positive radius is needed; got {self.radius}; give such a radius")

    @property
    def diameter(self) -> float:
        return 2 * self.radius

    def project(self, x: Tensor) -> Tensor:
        offset = x - self.centre.to(x)
        length = offset.norm(dim=-1, keepdim=True)
        return torch.where(length > self.radius, self.centre.to(x) + offset * (self.radius / length), x)

    def project_in(self, metric: Tensor, x: Tensor) -> Tensor:
        """In the eigenbasis the solution is wᵢ λᵢ/(λᵢ + ν); ν ≥ 0 solves ‖·‖ = radius by a monotone Newton iteration."""
        values, vectors = torch.linalg.eigh(metric)
        target = ((x - self.centre.to(x)).unsqueeze(-2) @ vectors).squeeze(-2)
        shift = torch.zeros_like(target[..., :1])
        for _ in range(50):
            found = target * values / (values + shift)
            length = found.norm(dim=-1, keepdim=True)
            slope = (found**2 / (values + shift)).sum(-1, keepdim=True).clamp_min(1e-300)
            change = (length**2 / slope * (length / self.radius - 1)).clamp_min(0.0)
            shift = shift + change
            if bool((change <= 1e-14 * (values[..., -1:] + shift)).all()):
                break
        found = target * values / (values + shift)
        return self.project(self.centre.to(x) + (vectors @ found.unsqueeze(-1)).squeeze(-1))


@dataclass(frozen=True)
class Box:
    """{x: low ≤ x ≤ high}, tensors or arrays (d,) with low < high.

    >>> Box(torch.zeros(2), torch.ones(2)).project(torch.tensor([-1.0, 0.5]))
    tensor([0.0000, 0.5000])
    """

    low: Tensor
    high: Tensor

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            end = torch.as_tensor(getattr(self, name))
            _set(self, name, end if end.is_floating_point() else end.double())
        bounded = bool(torch.isfinite(self.low).all() and torch.isfinite(self.high).all())
        if self.low.ndim != 1 or self.low.shape != self.high.shape or not bounded or not (self.low < self.high).all():
            raise UserError("finite low < high of one shape (d,) are needed; got others; give such bounds")

    @property
    def diameter(self) -> float:
        return float((self.high - self.low).norm())

    @property
    def centre(self) -> Tensor:
        return (self.low + self.high) / 2

    def project(self, x: Tensor) -> Tensor:
        return x.clamp(self.low.to(x), self.high.to(x))

    def project_in(self, metric: Tensor, x: Tensor) -> Tensor:
        return project_in(metric, x, self.project, (self.low.to(x), self.high.to(x)), keeps_sum=False)


@dataclass(frozen=True)
class Simplex:
    """{x: x ≥ 0, Σ x = total} in d dimensions, d ≥ 2.

    >>> Simplex(3).project(torch.tensor([2.0, 1.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """

    num_dims: int
    total: float = 1.0
    centre: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.num_dims < 2 or not 0 < self.total < math.inf:
            raise UserError(
                f"at least 2 dimensions and a positive total are needed; got {self.num_dims} and {self.total}; give such"
            )
        _set(self, "centre", torch.full((self.num_dims,), self.total / self.num_dims, dtype=torch.float64))

    @property
    def diameter(self) -> float:
        return math.sqrt(2) * self.total

    def project(self, x: Tensor) -> Tensor:
        """Subtract the threshold that makes the positive parts sum to the total."""
        falling = x.sort(dim=-1, descending=True).values
        excess = falling.cumsum(-1) - self.total
        places = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        num_positive = (falling * places > excess).sum(-1, keepdim=True)
        threshold = excess.gather(-1, num_positive - 1) / num_positive
        return (x - threshold).clamp_min(0.0)

    def project_in(self, metric: Tensor, x: Tensor) -> Tensor:
        bounds = torch.zeros_like(x), torch.full_like(x, math.inf)
        return project_in(metric, x, self.project, bounds, keeps_sum=True)


def _point(value: Any, fill: float) -> Tensor:
    if isinstance(value, int) and value >= 1:
        return torch.full((value,), fill, dtype=torch.float64)
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if isinstance(value, Tensor) and value.ndim == 1 and len(value) > 0 and torch.isfinite(value).all():
        return value if value.is_floating_point() else value.double()
    raise UserError(f"a finite centre of shape (d,), or a dimension of at least 1, is needed; got {value!r}; give one")


def _set(target: Any, name: str, value: Any) -> None:
    object.__setattr__(target, name, value)
