"""A linear map that keeps some rows of its operand for the gradient of its weight, which stays unbiased.

    dW = Σ_{i in C} g_i x_iᵀ + Σ_{j drawn} g_j x_jᵀ (1 − P_C) / (p_j (k − c)),    E[dW] = Σ_i g_i x_iᵀ        `weighted_rows`

Result, gradient of the operand and gradient of the bias are those of the map itself. Of rows of equal norm nothing is certain
(c = 0), and with uncorrelated rows E‖dW − E[dW]‖² is n / k of ‖E[dW]‖²: `variance_bound`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST_ROWS = 10
"""The fewest rows that are kept: a batch of no more keeps all."""


def rows_kept(num: int, share: float, least: int = LEAST_ROWS) -> int:
    """Return how many of `num` rows are kept.

    >>> rows_kept(100, 0.3), rows_kept(20, 0.3), rows_kept(4, 0.3)
    (30, 10, 10)
    """
    return max(int(share * num), least, 1)


def variance_bound(num: int, share: float) -> float:
    """Return the variance of the estimate in units of Σ_i ‖g_i‖² ‖x_i‖² where all rows have the same norm: n / k.

    >>> variance_bound(1000, 0.25)
    4.0
    """
    return num / min(num, rows_kept(num, share))


def row_norms(rows: Tensor) -> Tensor:
    """Return ‖x_i‖ of rows [n, features], in fp32 at least."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.promote_types(rows.dtype, torch.float32))


def weighted_rows(scores: Tensor, k: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return the numbers of k rows and their weights [..., k], such that Σ w_i v_i is Σ v over all rows in expectation.

    scores: [..., n], of at least 0, by which rows are taken, each leading index by itself: all zero are all equal. 1 ≤ k < n.

    >>> rows, weights = weighted_rows(torch.tensor([8.0, 1.0, 1.0]), 2)
    >>> rows[0].item(), weights.tolist()
    (0, [1.0, 2.0])
    """
    num, tiny = scores.shape[-1], torch.finfo(scores.dtype).tiny
    total = scores.sum(-1, keepdim=True)
    p = torch.where(total > 0, scores / total.clamp_min(tiny), 1.0 / num)
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    left = ordered.flip(-1).cumsum(-1).flip(-1)[..., :k]  # 1 − P_C for c = 0 … k − 1, without cancellation
    places = torch.arange(num, device=p.device)
    c = torch.argmin(left / (k - places[:k]), -1, keepdim=True)  # a tensor throughout: nothing waits for the device
    tail = left.gather(-1, c)
    drawable = torch.where(tail > 0, torch.where(places >= c, ordered, 0.0), (places >= c).to(p.dtype))
    flat = torch.multinomial(drawable.reshape(-1, num), k, replacement=True, generator=generator)
    drawn = flat.reshape(*scores.shape[:-1], k)
    sure = places[:k] < c
    scale = tail / (ordered.gather(-1, drawn) * (k - c)).clamp_min(tiny)
    return order.gather(-1, torch.where(sure, places[:k], drawn)), torch.where(sure, 1.0, scale)


def sampled_map(target: Callable[..., Tensor], share: float, input_first: bool) -> Callable[..., Tensor]:
    """Return the linear map `target(x, weight, bias)` in the form that keeps a share of the rows of x, drawn by `generator`.

    input_first: the weight is [in, out]. Where all rows would be kept, or nothing needs the weight's gradient, it is `target`.
    """

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        num = x.shape[:-1].numel()
        k = rows_kept(num, share)
        if k >= num or not (torch.is_grad_enabled() and weight.requires_grad):
            return target(x, weight, bias)
        scores = row_norms(x.detach().reshape(num, -1))
        return SampledProduct.apply(x, weight, bias, k, scores, target, input_first, None, generator)  # type: ignore[no-any-return]

    return product


class SampledProduct(torch.autograd.Function):
    """A linear map of all rows, exact, whose backward has k weighted rows for the gradient of the weight.

    scores: [n], by which rows are taken. noted: is given ‖g_i‖ of all rows in the backward; None: nobody asks. generator: draws;
    None: torch's own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, k: int, scores: Tensor, target: Callable[..., Tensor],
        input_first: bool, noted: Callable[[Tensor], None] | None, generator: torch.Generator | None,
    ) -> Tensor:  # fmt: skip
        numbers, scale = weighted_rows(scores, k, generator)
        kept = x.detach().reshape(-1, x.shape[-1])[numbers]
        kept.mul_(scale.unsqueeze(-1))  # in the input's dtype, the scaled row is what is kept
        ctx.save_for_backward(kept, numbers, weight)
        ctx.shape, ctx.has_bias, ctx.input_first, ctx.noted = x.shape, bias is not None, input_first, noted
        return target(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, numbers, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.noted is not None:
            ctx.noted(torch.linalg.vector_norm(grad.detach(), dim=-1))
        wanted, own = ctx.needs_input_grad, weight.t() if ctx.input_first else weight
        of_input = (grad @ own).reshape(ctx.shape) if wanted[0] else None
        of_weight = None
        if wanted[1]:
            rows = grad[numbers]
            of_weight = kept.T @ rows if ctx.input_first else rows.T @ kept
        of_bias = grad.sum(0) if ctx.has_bias and wanted[2] else None
        return of_input, of_weight, of_bias, None, None, None, None, None, None


class SampledBatchedProduct(torch.autograd.Function):
    """A product a · b of matrices with leading dims, whose backward has k weighted rows of each `a` for the gradient of `b`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, k: int) -> Tensor:
        numbers, scale = weighted_rows(row_norms(a.detach()), k)
        kept = a.detach().gather(-2, numbers.unsqueeze(-1).expand(*numbers.shape, a.shape[-1]))
        ctx.save_for_backward(kept.mul_(scale.unsqueeze(-1)), numbers, b)
        return a @ b

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, numbers, b = ctx.saved_tensors
        (grad,), wanted = grads, ctx.needs_input_grad
        of_a = grad @ b.mT if wanted[0] else None
        if not wanted[1]:
            return of_a, None, None
        rows = grad.gather(-2, numbers.unsqueeze(-1).expand(*numbers.shape, grad.shape[-1]))
        return of_a, kept.mT @ rows, None
