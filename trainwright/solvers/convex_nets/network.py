r"""A two-layer ReLU network Σ_j relu(X u_j) a_j, and how one is read off a solution of the convex programme."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import losses


@dataclass(frozen=True)
class TwoLayerReLU:
    """Hidden weights (d, m) and output weights (m); without biases, for which X carries a column of ones.

    >>> net = TwoLayerReLU(torch.tensor([[1.0, -1.0]]), torch.tensor([2.0, 3.0]))
    >>> net(torch.tensor([[2.0], [-1.0]]))
    tensor([4., 3.])
    """

    hidden: Tensor
    output: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Return the outputs (n) at X (n, d)."""
        return (X @ self.hidden).clamp_min(0.0) @ self.output

    def objective(self, X: Tensor, y: Tensor, beta: float, loss: str = "squared") -> float:
        """Return loss + (β/2) Σ_j (‖u_j‖² + a_j²), the non-convex training objective."""
        decay = beta / 2 * (self.hidden.square().sum() + self.output.square().sum())
        return float(losses.value(loss, self(X), y) + decay)


def recover(v: Tensor, rtol: float = 1e-6) -> TwoLayerReLU:
    r"""Return the network of v (2, P, d): for each block u_j = v_i/√‖v_i‖ with a_j = √‖v_i‖, negative in the second half.

    Blocks whose norm is at most `rtol` of the largest are left out. Where v keeps to its patterns, the network's objective
    is the convex programme's; else it is what the network's own ReLUs make of it, so look at that one.

    >>> recover(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]], dtype=torch.float64)).output
    tensor([2.2361], dtype=torch.float64)
    """
    norms = v.norm(dim=-1)
    kept = norms > rtol * norms.max()
    root = norms[kept].sqrt()
    signs = torch.tensor([1.0, -1.0], dtype=v.dtype, device=v.device)[:, None].expand_as(norms)[kept]
    return TwoLayerReLU((v[kept] / root[:, None]).T, signs * root)
