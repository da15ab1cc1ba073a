"""Clipping the few largest coordinates of the whole gradient: SGD and Adam with it.

τ = the (⌊N·k⌋ + 1)-th largest |g| of a group's N elements        `_threshold`
g ← sign(g) · min(|g|, τ)                                         `clipped`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..artifacts import UserError
from ..numerics.hvp import placed_like, real_view
from ..numerics.select import kth_largest_magnitude, selection_bytes
from ..numerics.shards import sum_over_shards
from .base import Lists, Method, Tensors, check_common, check_range, plain
from .record import STEP, OptimizerRecord, Options, Shape, kept, list_temporaries


class ClippedSGD(Method):
    r"""Descend along the gradient whose largest share of coordinates is clipped to one magnitude.

        τ = the (⌊N·k⌋ + 1)-th largest |g|,   ĝ = sign(g) · min(|g|, τ)
        b ← μ b + (ĝ + λθ),   θ ← θ − lr · b

    with N all elements of the parameter group, whole model or not, and τ new each step: it follows the gradient's
    scale, unlike a fixed bound. Where curvature sits in few coordinates, as in transformers, this takes most of what
    adaptive methods gain over SGD, without their state; where no coordinates stand out, it is SGD with a smaller step.

    clip: k, the share of coordinates clipped; 0 clips none, 1 leaves nothing. 0.1 for SGD.
    threshold_scale: multiplies τ. momentum: μ, 0 keeps no buffer. weight_decay: λ, added to the clipped gradient.

    With sharded parameters (`DTensor`) τ is that of the whole, found by counting: four messages of 2 KiB a group
    and step. NaN counts as the largest of all, and stays. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> weight.grad = torch.tensor([10.0, -2.0, 1.0, 0.5])
    >>> ClippedSGD([weight], lr=1.0, clip=0.25).step()
    >>> weight.detach()
    tensor([-2.0000,  2.0000, -1.0000, -0.5000])

    Source: Pan, Li, *Toward Understanding Why Adam Converges Faster Than SGD for Transformers*, 2023. The authors' code
    clips in its multi-tensor path only; this always does.
    """

    _state_names = ("momentum_buffer",)

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-2, clip: float = 0.1, momentum: float = 0.0,
                 weight_decay: float = 0.0, *, threshold_scale: float = 1.0, **how: Any) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "clip": clip, "momentum": momentum, "weight_decay": weight_decay, "threshold_scale": threshold_scale,
        }  # fmt: skip
        super().__init__(params, defaults, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("ClippedSGD", settings["lr"], (), 0.0, settings["weight_decay"])
        check_clipping("ClippedSGD", settings)
        check_range("ClippedSGD", momentum=(settings["momentum"], "in [0, 1)", lambda value: 0 <= value < 1))

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names if group["momentum"] else ()

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**super()._options(group), "threshold": gradient_threshold(group)}

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        steps = clipped(grads, options["threshold"])
        if options["weight_decay"]:
            torch._foreach_add_(steps, params, alpha=options["weight_decay"])
        if options["momentum"]:
            buffers = states["momentum_buffer"]
            torch._foreach_mul_(buffers, options["momentum"])
            torch._foreach_add_(buffers, steps)
            torch._foreach_copy_(steps, buffers)
        torch._foreach_mul_(steps, -lr)
        torch._foreach_add_(params, steps)


class ClippedAdam(Method):
    r"""Adam whose first moment takes the clipped gradient and whose second moment takes the raw one.

        m ← β₁ m + (1 − β₁) ĝ,   v ← β₂ v + (1 − β₂) g²
        θ ← θ (1 − lr·λ) − lr · m̂ / (√v̂ + ε)

    ĝ as in `ClippedSGD`, and m̂, v̂ with bias correction. With `clip_update` the gradient goes in raw and the finished
    update is clipped by the same rule. The gain over Adam is far less than clipping's over SGD.

    clip: k, the share of coordinates clipped; 0.5 for Adam. threshold_scale: multiplies τ.
    clip_update: clip the update in place of the gradient; holds all of a group's updates at once.
    weight_decay: λ, decoupled.

    Sharded parameters and NaN as in `ClippedSGD`. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([10.0, -2.0])
    >>> ClippedAdam([weight], lr=1.0, clip=0.5).step()
    >>> weight.detach()
    tensor([-0.2000,  1.0000])

    Source: Pan, Li, *Toward Understanding Why Adam Converges Faster Than SGD for Transformers*, 2023. It departs in that
    weight decay is decoupled.
    """

    _state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, clip: float = 0.5, *, threshold_scale: float = 1.0,
                 clip_update: bool = False, **how: Any) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip,
            "threshold_scale": threshold_scale, "clip_update": clip_update,
        }  # fmt: skip
        super().__init__(params, defaults, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("ClippedAdam", settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])
        check_clipping("ClippedAdam", settings)
        if settings["clip_update"] and settings["fused"]:
            raise UserError(
                "ClippedAdam finds the bound of its updates between two passes; got clip_update=True and fused=True; "
                "leave one out"
            )

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        threshold = None if group["clip_update"] else gradient_threshold(group)
        return {**super()._options(group), "threshold": threshold}

    def _step_group(self, group: dict[str, Any]) -> None:
        if not group["clip_update"]:
            return super()._step_group(group)
        options, lr, batches = self._options(group), group["lr"], list(self._batches(group))
        found = [
            _direction(batch.grads, batch.states, {**options, **self._step_numbers(batch.step, lr, options)})
            for batch in batches
        ]
        owners = [param for batch in batches for param in batch.owners]
        threshold = _threshold([update for updates in found for update in updates], owners, group)
        for batch, updates in zip(batches, found):
            steps = clipped(updates, threshold)
            _apply(batch.params, steps, lr, options)
            batch.write_back()

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        _apply(params, _direction(grads, states, options), lr, options)

    @staticmethod
    def _step_numbers(step: Any, lr: Any, options: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = options["betas"]
        return {"first": 1 - beta1**step, "root": (1 - beta2**step) ** 0.5}


def _direction(grads: list[Tensor], states: Lists, options: dict[str, Any]) -> list[Tensor]:
    """Update the moments in place and return Adam's direction."""
    (beta1, beta2), means, squares = options["betas"], states["exp_avg"], states["exp_avg_sq"]
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    firsts = grads if options["threshold"] is None else clipped(grads, options["threshold"])
    torch._foreach_lerp_(means, firsts, 1 - beta1)
    del firsts
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, options["root"])
    torch._foreach_add_(roots, options["eps"])
    updates = torch._foreach_div(means, roots)
    torch._foreach_div_(updates, options["first"])
    return list(updates)


def _apply(params: list[Tensor], steps: Tensors, lr: Any, options: dict[str, Any]) -> None:
    if options["weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
    torch._foreach_mul_(steps, -lr)
    torch._foreach_add_(params, steps)


def clipped(tensors: Tensors, threshold: Tensor | None) -> list[Tensor]:
    """Return copies of `tensors`, clipped to ±`threshold`; `None` clips nothing."""
    if threshold is None:
        return [tensor.clone() for tensor in tensors]
    bounds = [threshold.to(tensor) for tensor in tensors]
    found = torch._foreach_minimum(tensors, bounds)
    torch._foreach_maximum_(found, torch._foreach_neg(bounds))
    return list(found)


def gradient_threshold(group: dict[str, Any]) -> Tensor | None:
    """τ for the gradients of a group; `None` where nothing is clipped."""
    owners = [param for param in group["params"] if param.grad is not None]
    return _threshold([real_view(plain(placed_like(param.grad, param))) for param in owners], owners, group)


def _threshold(tensors: Sequence[Tensor], owners: Sequence[Tensor], group: dict[str, Any]) -> Tensor | None:
    """τ for the elements of all tensors, the ranks' shards of `owners`; `None` where nothing is clipped."""
    num_all = sum(real_view(param).numel() for param in owners)
    index = int(num_all * group["clip"])
    if group["clip"] == 0 or num_all == 0:
        return None
    if index >= num_all:
        return torch.zeros((), device=tensors[0].device)

    def add(counts: Iterable[Tensor]) -> Tensor:
        return sum_over_shards(zip(counts, owners))

    shared = any(isinstance(param, DTensor) for param in owners)
    return kth_largest_magnitude(tensors, index, add if shared else None) * group["threshold_scale"]


def check_clipping(owner: str, settings: dict[str, Any]) -> None:
    """Raise `UserError` for settings of clipping out of range."""
    check_range(
        owner,
        clip=(settings["clip"], "in [0, 1]", lambda value: 0 <= value <= 1),
        threshold_scale=(settings["threshold_scale"], "above 0", lambda value: value > 0),
    )


def clipping_temporaries(num_copies: int) -> Callable[[Shape, int, Options], int]:
    """Those of the update, or of the threshold's selection before it, whichever is more."""

    def temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
        update = list_temporaries(num_copies)(shape, element_bytes, options)  # none if fused
        selection = selection_bytes(math.prod(shape)) if 0 < options["clip"] < 1 else 0
        if options.get("clip_update"):
            selection += list_temporaries(1)(shape, element_bytes, options)
        return max(update, selection)

    return temporaries


RECORDS = (
    OptimizerRecord(
        "clippedsgd",
        ClippedSGD,
        "SGD with the largest coordinates of the whole gradient clipped to one magnitude",
        (kept("momentum_buffer", "momentum"), STEP),
        clipping_temporaries(1),
        defaults={"clip": 0.1},
        paper="Pan, Li 2023, arXiv:2306.00204",
    ),
    OptimizerRecord(
        "clippedadam",
        ClippedAdam,
        "Adam whose first moment takes the gradient with its largest coordinates clipped",
        (kept("exp_avg"), kept("exp_avg_sq"), STEP),
        clipping_temporaries(2),
        defaults={"clip": 0.5},
        paper="Pan, Li 2023, arXiv:2306.00204",
        departs="decoupled weight decay",
    ),
)
