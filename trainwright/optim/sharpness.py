"""Directional sharpness: the curvature of the loss along a direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..artifacts import UserError
from ..numerics.hvp import gradients, hessian_vector, real_view
from ..numerics.shards import sum_over_shards
from .base import plain


def directional_sharpness(
    loss_fn: Callable[..., Tensor],
    params: Iterable[Tensor],
    direction: Sequence[Tensor],
    batches: Iterable[Any] | None = None,
) -> float:
    r"""Return S(u) = uᵀ ∇²f(θ) u / ‖u‖² of a loss f along a direction u, all parameters as one vector.

    Along the update θ − η v the loss is f − η ⟨∇f, v⟩ + η²/2 · S(v) ‖v‖² to second order: of two directions with one
    slope, the less sharp one allows the longer step. One Hessian-vector product a batch. Keep the model in eval mode,
    as dropout would draw a different loss each time, and attention on a kernel with a second derivative
    (`SDPBackend.MATH`).

    loss_fn: returns the loss with its graph, without calling backward; called with each of `batches`, or once with
        nothing where there are none.
    params: θ. direction: u, a tensor for each parameter in its shape; any length but zero.
    batches: the loss is the mean over them.

    Raises `UserError` for a direction of other shapes or of length zero, and for no batches; `ValueError` for a loss without
    a graph or a second derivative.

    >>> import torch
    >>> weight = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> loss = lambda: (torch.tensor([1.0, 9.0]) * weight**2).sum() / 2
    >>> directional_sharpness(loss, [weight], [torch.tensor([1.0, 1.0])])
    5.0

    Source: Pan, Li, *Toward Understanding Why Adam Converges Faster Than SGD for Transformers*, 2023.
    """
    weights = list(params)
    _check_direction(weights, direction)
    square = float(_inner(direction, direction, weights))
    if not 0 < square < math.inf:
        raise UserError(f"a direction of finite length above 0 is needed; got squared length {square}; give another")
    arguments = [()] if batches is None else [(batch,) for batch in batches]
    if not arguments:
        raise UserError("at least one batch is needed; got none; leave `batches` out where the loss needs none")
    curvatures = [_curvature(loss_fn(*given), weights, direction) for given in arguments]
    return sum(curvatures) / len(curvatures) / square


def _curvature(loss: Tensor, params: list[Tensor], direction: Sequence[Tensor]) -> float:
    """uᵀHu of one loss."""
    grads = gradients(loss, params)
    used = [(grad, param, part) for grad, param, part in zip(grads, params, direction) if grad is not None]
    if not used:
        return 0.0
    found, weights, parts = (list(column) for column in zip(*used))
    return float(_inner(hessian_vector(found, weights, parts), parts, weights))


def _inner(first: Sequence[Tensor], second: Sequence[Tensor], owners: Sequence[Tensor]) -> Tensor:
    """Σ over all elements and ranks, in fp64."""
    parts = [(real_view(plain(a)).double() * real_view(plain(b)).double()).sum() for a, b in zip(first, second)]
    return sum_over_shards(list(zip(parts, owners)))


def _check_direction(params: list[Tensor], direction: Sequence[Tensor]) -> None:
    wanted, found = [tuple(param.shape) for param in params], [tuple(part.shape) for part in direction]
    if wanted != found or not wanted:
        raise UserError(
            f"a direction in the parameters' shapes is needed; got {len(found)} tensors for {len(wanted)} parameters, "
            f"{found[:3]} against {wanted[:3]}; give a tensor for each"
        )
