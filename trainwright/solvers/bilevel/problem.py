"""The oracle of min over x of (1/m) Σᵢ fᵢ(x, yᵢ(x)), yᵢ(x) = argmin gᵢ(x, ·): derivatives of chosen blocks, counted.

    ∇F = (1/m) Σᵢ ∇ₓfᵢ - ∇²ₓᵧgᵢ [∇²ᵧᵧgᵢ]⁻¹ ∇ᵧfᵢ      the hypergradient, at yᵢ(x)

A block's gradient counts one `nsfo`, its Hessian- or Jacobian-vector product one `nhvp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Counts
from ..values import Packing

Level = Callable[[Any, Tensor, Tensor, Any], Tensor]
"""(x, y [I, d], blocks [I], batch) → the objective of each chosen block [I]."""
Sample = Callable[[Tensor, torch.Generator], Any]
"""(blocks [I], generator) → a batch, handed to both levels unread; drawn once a step."""


@runtime_checkable
class Method(Protocol):
    """Any method for the two levels: a state whose x [n], y [m, d] and direction [n] `bilevel` reads, and its steps."""

    def start(self, problem: Blocks, x: Tensor, y: Tensor) -> Any:
        """Return the state before the first step."""

    def step(self, problem: Blocks, state: Any, sample: Sample, generator: torch.Generator) -> Any:
        """Return the next state; what the old one holds is not written to."""


class Blocks:
    """The user's two levels. x is one vector (`packing` unpacks it), y is [m, d]."""

    def __init__(self, upper: Level, lower: Level, packing: Packing, num_blocks: int) -> None:
        self.upper, self.lower, self.packing, self.num_blocks = upper, lower, packing, num_blocks
        self.counts = Counts(nfev=0, nsfo=0, nhvp=0)

    def at(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Local:
        """Return the derivatives at x and the rows y [I, d] of `blocks`."""
        return Local(self, x, y, blocks, batch)

    def values(self, level: Level, name: str, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        with torch.enable_grad():
            found = level(self.packing.unpack(x), y, blocks, batch)
        if not isinstance(found, Tensor) or found.shape != blocks.shape or not found.requires_grad:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UserError(
                f"{name} that returns one differentiable value a block, shape [{len(blocks)}], is needed; got {shape}; "
                "reduce over data, not over blocks"
            )
        return found

    def count(self, num_gradients: int = 0, num_products: int = 0) -> None:
        self.counts.add(nsfo=num_gradients, nhvp=num_products, nfev=num_gradients + num_products)


class Local:
    """Derivatives of both levels at one point, on one batch; each is computed when first asked for."""

    def __init__(self, problem: Blocks, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> None:
        self.problem, self.size = problem, len(blocks)
        self.x, self.y = x.detach().requires_grad_(), y.detach().requires_grad_()
        self._lower = problem.values(problem.lower, "lower", self.x, self.y, blocks, batch).sum()
        self._upper = lambda: problem.values(problem.upper, "upper", self.x, self.y, blocks, batch).sum()
        self._slope: Tensor | None = None
        self._uppers: tuple[Tensor, Tensor] | None = None

    @property
    def lower_y(self) -> Tensor:
        """∇ᵧgᵢ [I, d], with its graph."""
        if self._slope is None:
            self.problem.count(num_gradients=self.size)
            (self._slope,) = torch.autograd.grad(self._lower, self.y, create_graph=True, materialize_grads=True)
        return self._slope

    @property
    def upper_xy(self) -> tuple[Tensor, Tensor]:
        """(Σ ∇ₓfᵢ, ∇ᵧfᵢ [I, d])."""
        if self._uppers is None:
            self.problem.count(num_gradients=self.size)
            grads = torch.autograd.grad(self._upper(), (self.x, self.y), materialize_grads=True)
            self._uppers = (grads[0], grads[1])
        return self._uppers

    def hessian_times(self, v: Tensor) -> Tensor:
        """∇²ᵧᵧgᵢ vᵢ for v [I, d]."""
        self.problem.count(num_products=self.size)
        return self._second(self.y, v)

    def hessians(self) -> Tensor:
        """∇²ᵧᵧgᵢ [I, d, d], by d Hessian-vector products."""
        num_dims = self.y.shape[1]
        self.problem.count(num_products=self.size * num_dims)
        slope = self.lower_y
        if not slope.requires_grad:  # lower is linear in both
            return torch.zeros(*self.y.shape, num_dims, dtype=self.y.dtype, device=self.y.device)
        basis = torch.eye(num_dims, dtype=self.y.dtype, device=self.y.device)[:, None, :].expand(-1, self.size, -1)
        (found,) = torch.autograd.grad(
            slope, self.y, basis, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        return torch.zeros_like(basis).transpose(0, 1) if found is None else found.transpose(0, 1)

    def hypergradient(self, v: Tensor) -> Tensor:
        """(1/I) Σ [∇ₓfᵢ - ∇²ₓᵧgᵢ vᵢ], where vᵢ stands for [∇²ᵧᵧgᵢ]⁻¹ ∇ᵧfᵢ."""
        self.problem.count(num_products=self.size)
        return (self.upper_xy[0] - self._second(self.x, v)) / self.size

    def _second(self, of: Tensor, v: Tensor) -> Tensor:
        slope = self.lower_y
        if not slope.requires_grad:  # lower is linear in y: its second derivatives vanish
            return torch.zeros_like(of)
        (found,) = torch.autograd.grad(slope, of, v, retain_graph=True, materialize_grads=True)
        return found
