"""`sampled_matmul`: a product of activations that keeps some rows of the first for the gradient of the second."""

from __future__ import annotations

import torch
from torch import Tensor

from ..artifacts import UserError
from ..ops.sampled import SampledBatchedProduct, rows_kept
from .sampled_linear import check_budget


def sampled_matmul(a: Tensor, b: Tensor, budget: float = 0.3, *, min_rows: int = 10, training: bool = True) -> Tensor:
    r"""Return a · b, and keep k of the n rows of each matrix of a for the gradient of b, which they estimate.

        db = Σ_{i in C} a_iᵀ g_i + Σ_{j drawn} a_jᵀ g_j (1 − P_C) / (p_j (k − c)),      E[db] = aᵀ g,      da = g bᵀ exactly

    The form of `SampledLinear` for attention's products, where each head of each example chooses rows of its own by its own
    norms: [batch, heads, n, i] · [batch, heads, i, o]. a: [..., n, i]; b: [..., i, o], with the same leading dims. budget: k / n,
    in (0, 1); min_rows: k at least. Where k ≥ n, without training, and where b needs no gradient, it is a · b. Kept: k (i
    elements and an index of 8 bytes) a matrix of a, and b, whole, for the gradient of a.

    Estimates may follow one another: each draws for itself, so that gradients behind both are unbiased still. Pays where nobody
    else keeps a: dropped attention weights do, and those that a softmax has made do not, for it keeps its own result; fused
    attention keeps neither, and is the better choice where it runs. Raises `UserError` for a budget out of range, and for
    operands whose leading dims differ.

    >>> weights, values = torch.rand(2, 4, 16, 16), torch.randn(2, 4, 16, 8, requires_grad=True)
    >>> sampled_matmul(weights, values, budget=0.25, min_rows=1).shape
    torch.Size([2, 4, 16, 8])

    Source: Liu et al. 2023, Winner-Take-All Column Row Sampling for Memory Efficient Adaptation of Language Model (NeurIPS),
    which takes one c for all heads.
    """
    check_budget(budget)
    if a.dim() < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise UserError(
            f"matrices [..., n, i] and [..., i, o] of the same leading dims are needed; got {list(a.shape)} and {list(b.shape)}; "
            "expand one to the other's"
        )
    num = a.shape[-2]
    k = rows_kept(num, budget, min_rows)
    if not training or k >= num or not (torch.is_grad_enabled() and b.requires_grad):
        return a @ b
    return SampledBatchedProduct.apply(a, b, k)  # type: ignore[no-any-return]
