r"""`MFACInverse`: products with, and the diagonal of, (λI + (1/m) Σ g_i g_iᵀ)⁻¹ for fixed gradients; pruning by them.

v_i = g_i/λ - Σ_{j<i} v_j (v_jᵀg_i)/n_j,  n_i = m + g_iᵀv_i       `_recursion`
F⁻¹x = x/λ - Σ_j v_j (v_jᵀx)/n_j                                 `MFACInverse.product`
[F⁻¹]_kk = 1/λ - Σ_j v_jk²/n_j                                   `MFACInverse.diagonal`
score_k = w_k² / (2 [F⁻¹]_kk)                                    `MFACInverse.scores`
w + F⁻¹e, e_k = -w_k/[F⁻¹]_kk on what is removed                 `MFACInverse.prune`
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..artifacts import UserError
from .base import check_range


class MFACInverse:
    r"""The inverse of λI + (1/m) Σ g_i g_iᵀ without a d×d matrix: O(dm²) once, O(dm) a product.

    gradients: [m, d], the rows g_i, per sample or of minibatches, of any real dtype (float64 where λ is far below the
    squared gradients: in fp32 a product is off by 2e-5 at λ = 1e-5 and 2e-3 at 1e-7 for gradients of size 0.01).
    damping: λ. block_size: `None`, or the length b of consecutive blocks of the d parameters that are inverted
    independently, each as above on its own part of the rows (128 is usual; a last block may be shorter): larger blocks
    see more, smaller ones are better conditioned for few gradients. kept: `None`, or [d], false for the weights that
    are already removed, which then stay so: no other weight makes up for theirs by moving them. Keeps m·d numbers of
    the gradients' dtype twice while it is built, once after. Raises `UserError` for shapes and settings that do not fit.

    >>> inverse = MFACInverse(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), damping=0.5)
    >>> dense = 0.5 * torch.eye(2) + torch.tensor([[1.0, 2.0], [2.0, 5.0]]) / 2
    >>> torch.allclose(inverse.product(torch.ones(2)), torch.linalg.solve(dense, torch.ones(2)))
    True

    Source: Frantar, Kurtic & Alistarh 2021, M-FAC, and the authors' code. Departs: the last of the m gradients counts,
    which the authors' loop leaves out.
    """

    def __init__(
        self, gradients: Tensor, damping: float = 1e-5, block_size: int | None = None, kept: Tensor | None = None
    ) -> None:
        if gradients.dim() != 2 or 0 in gradients.shape or not gradients.is_floating_point():
            raise UserError(
                "MFACInverse needs gradients [num_gradients, num_params] of a real dtype; "
                f"got shape {tuple(gradients.shape)}, {gradients.dtype}; stack flat gradients as rows"
            )
        if not torch.isfinite(gradients).all():
            raise UserError("MFACInverse needs finite gradients; got NaN or infinity; leave such samples out")
        check_range("MFACInverse", damping=(damping, "above 0", lambda value: value > 0.0))
        num_params = gradients.shape[1]
        width = num_params if block_size is None else block_size
        check_range("MFACInverse", block_size=(width, "of at least 1", lambda value: value >= 1))
        self.num_params, self.damping = num_params, damping
        if kept is not None:
            self._check_length(kept, "kept")
        rows = gradients.detach() if kept is None else gradients.detach() * kept
        self._vectors, self._norms = _recursion(_blocks(rows, width), damping)

    @torch.no_grad()
    def product(self, vector: Tensor) -> Tensor:
        """Return F⁻¹x for a vector [d]."""
        self._check_length(vector, "product")
        x = _blocks(vector[None].to(self._vectors.dtype), self._vectors.shape[2])[0]
        along = torch.einsum("mbk,bk->mb", self._vectors, x) / self._norms
        return (x / self.damping - torch.einsum("mb,mbk->bk", along, self._vectors)).reshape(-1)[: self.num_params]

    @torch.no_grad()
    def diagonal(self) -> Tensor:
        """Return the diagonal of F⁻¹, [d]."""
        taken = torch.einsum("mbk,mb->bk", self._vectors**2, 1 / self._norms)
        return (1 / self.damping - taken).reshape(-1)[: self.num_params]

    @torch.no_grad()
    def scores(self, weights: Tensor) -> Tensor:
        """Return the predicted rise of the loss if one weight alone is removed and the others make up for it, [d]."""
        self._check_length(weights, "scores")
        return weights**2 / (2 * self.diagonal().to(weights.dtype))

    @torch.no_grad()
    def prune(self, weights: Tensor, num_pruned: int) -> Tensor:
        """Return `weights` [d] with the `num_pruned` of the lowest score at zero and the others adjusted for that.

        Interactions among those that are removed at once are left out: remove few at a time, and between
        (`pruning_stages`) take fresh gradients with `kept=weights != 0`; half of the weights at once can be worse than
        by magnitude. Weights at zero score lowest, so `num_pruned` counts them too.
        """
        check_range(
            "MFACInverse",
            num_pruned=(num_pruned, f"in 0..{self.num_params}", lambda value: 0 <= value <= self.num_params),
        )
        removed = self.scores(weights).topk(num_pruned, largest=False).indices
        change = torch.zeros_like(weights)
        change[removed] = -weights[removed] / self.diagonal().to(weights.dtype)[removed]
        pruned = weights + self.product(change).to(weights.dtype)
        pruned[removed] = 0.0
        return pruned

    def _check_length(self, vector: Tensor, owner: str) -> None:
        if vector.shape != (self.num_params,):
            raise UserError(
                f"{owner} needs a vector of shape ({self.num_params},), an element a parameter; "
                f"got {tuple(vector.shape)}; flatten the parameters as the gradients were"
            )


def pruning_stages(start: float, end: float, num_stages: int) -> list[float]:
    """Return the sparsities (zero share, 0 to 1) to prune to in turn: each stage keeps the same share of what is left.

    >>> [round(sparsity, 3) for sparsity in pruning_stages(0.0, 0.75, 2)]
    [0.5, 0.75]
    """
    check_range(
        "pruning_stages",
        start=(start, "in [0, 1)", lambda value: 0.0 <= value < 1.0),
        end=(end, "in [start, 1)", lambda value: start <= value < 1.0),
        num_stages=(num_stages, "of at least 1", lambda value: value >= 1),
    )
    kept = (1 - end) / (1 - start)
    return [1 - (1 - start) * kept ** (stage / num_stages) for stage in range(1, num_stages + 1)]


def _blocks(rows: Tensor, width: int) -> Tensor:
    """Cut rows [m, d] into [m, blocks, width], the last filled up with zeros, which change no block's inverse."""
    missing = -rows.shape[1] % width
    return torch.nn.functional.pad(rows, (0, missing)).view(rows.shape[0], -1, width)


def _recursion(gradients: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return the vectors v [m, blocks, width] and the numbers n [m, blocks] of every block."""
    size = gradients.shape[0]
    vectors = gradients / damping
    norms = torch.empty(gradients.shape[:2], dtype=gradients.dtype, device=gradients.device)
    for index in range(size):
        done = vectors[:index]
        along = torch.einsum("mbk,bk->mb", done, gradients[index]) / norms[:index]
        vectors[index] -= torch.einsum("mb,mbk->bk", along, done)
        norms[index] = size + (gradients[index] * vectors[index]).sum(-1)
    return vectors, norms
