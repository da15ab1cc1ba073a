r"""The programme's linear maps, never as matrices; u (2, P, d) holds the weights v (of +1) and w (of -1) by pattern.

    F u = Σ_i D_i X (v_i - w_i)                    `Gates.output`, its transpose `Gates.output_adjoint`
    G u = (2 D_i - I) X v_i, and of w_i            `Gates.margins`, its transpose `Gates.margins_adjoint`
    (I + F'F/ρ + G'G)⁻¹                            `InverseSystem`

G_i'G_i = X'X for every i. In (v - w)/√2 and (v + w)/√2 the system falls apart into B = I + X'X for each block of the sum,
and B ⊕ … ⊕ B + (2/ρ) A'A, A = [D_1 X … D_P X], for the difference; the latter needs a matrix of n rows (by Woodbury, with
A B⁻¹ A' = (X B⁻¹ X') ∘ (D D')) or of P d rows: the smaller is factored, once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Gates:
    """The maps of examples X (n, d) and patterns (n, P)."""

    def __init__(self, X: Tensor, patterns: Tensor) -> None:
        self.X, self.passes = X, patterns.to(X.dtype)
        self.signs = 2 * self.passes - 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """n, P, d."""
        return (len(self.X), self.passes.shape[1], self.X.shape[1])

    def output(self, u: Tensor) -> Tensor:
        """Return F u (n)."""
        return self.gated(u[0] - u[1])

    def output_adjoint(self, residual: Tensor) -> Tensor:
        """Return F' r (2, P, d)."""
        found = self.gated_adjoint(residual)
        return torch.stack([found, -found])

    def gated(self, weights: Tensor) -> Tensor:
        """Return A z = Σ_i D_i X z_i (n) for z (P, d)."""
        return ((self.X @ weights.T) * self.passes).sum(1)

    def gated_adjoint(self, residual: Tensor) -> Tensor:
        """Return A' r (P, d)."""
        return (self.passes * residual[:, None]).T @ self.X

    def margins(self, u: Tensor) -> Tensor:
        """Return G u (2, n, P): negative where a unit's weights do not keep to its pattern."""
        return self.signs * (self.X @ u.transpose(-1, -2))

    def margins_adjoint(self, margins: Tensor) -> Tensor:
        """Return G' s (2, P, d)."""
        return (self.signs * margins).transpose(-1, -2) @ self.X


class InverseSystem:
    """Solves (I + F'F/ρ + G'G) u = b, from one factorisation of a matrix of min(n, P d) rows and one of d rows."""

    def __init__(self, gates: Gates, rho: float) -> None:
        self.gates = gates
        n, num_patterns, d = gates.shape
        eye = torch.eye(d, dtype=gates.X.dtype, device=gates.X.device)
        block = eye + gates.X.T @ gates.X
        self._block = torch.linalg.cholesky(block)
        self._by_examples = n <= num_patterns * d
        self._factor = torch.linalg.cholesky(self._examples(rho) if self._by_examples else self._weights(rho, block))

    def solve(self, b: Tensor) -> Tensor:
        """Return u (2, P, d)."""
        total = self.block_solve((b[0] + b[1]) / math.sqrt(2))
        difference = self._difference((b[0] - b[1]) / math.sqrt(2))
        return torch.stack([total + difference, total - difference]) / math.sqrt(2)

    def block_solve(self, rows: Tensor) -> Tensor:
        """Return B⁻¹ of each row (…, d)."""
        return torch.cholesky_solve(rows.reshape(-1, rows.shape[-1]).T, self._block).T.reshape(rows.shape)

    def kernel(self) -> Tensor:
        """Return A B⁻¹ A' (n, n)."""
        gates = self.gates
        return (gates.X @ self.block_solve(gates.X).T) * (gates.passes @ gates.passes.T)

    def _difference(self, b: Tensor) -> Tensor:
        if not self._by_examples:
            return torch.cholesky_solve(b.reshape(-1, 1), self._factor).view(b.shape)
        found = self.block_solve(b)
        inner = torch.cholesky_solve(self.gates.gated(found)[:, None], self._factor).flatten()
        return found - self.block_solve(self.gates.gated_adjoint(inner))

    def _examples(self, rho: float) -> Tensor:
        """Return ρ/2 I + A B⁻¹ A' (n, n)."""
        both = self.kernel()
        both.diagonal().add_(rho / 2)
        return both

    def _weights(self, rho: float, block: Tensor) -> Tensor:
        """Return B ⊕ … ⊕ B + (2/ρ) A'A (P d, P d)."""
        gates = self.gates
        n, num_patterns, d = gates.shape
        gated = (gates.passes[:, :, None] * gates.X[:, None, :]).reshape(n, num_patterns * d)
        return torch.block_diag(*[block] * num_patterns) + (2 / rho) * (gated.T @ gated)
