"""diffGrad: Adam's step, damped where the gradient has stopped changing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .base import Lists, Method, add_quotients, check_common
from .record import STEP, OptimizerRecord, kept, list_temporaries


class DiffGrad(Method):
    r"""Multiply Adam's step by a friction between ½, where the gradient stands still, and 1, where it jumps.

        g ← g + λθ
        m ← β1 m + (1 - β1) g,    v ← β2 v + (1 - β2) g²
        ξ = 1 / (1 + exp(-|g_previous - g|))
        θ ← θ - lr · √(1 - β2^t) / (1 - β1^t) · ξ m / (√v + ε)

    lr, betas, eps: as Adam's. weight_decay: λ, added to the gradient. eps_corrected: write the last line with both
    moments corrected, ξ m̂ / (√v̂ + ε), as the paper does; the authors' code, and the default, lets ε count less in the
    first steps. g_previous is zero at the first step.

    The friction depends on the gradient's unit: where |g| is far below 1 everywhere, it is ½ everywhere, and the method
    is Adam at half the learning rate. A gradient with NaN makes its elements NaN for good. Complex parameters count as
    pairs of reals. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = DiffGrad([weight], lr=0.1)
    >>> weight.grad = torch.tensor([1e-3, 100.0])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([0.9500, 0.9000])

    Source: Dubey, Chakraborty, Roy, Mukherjee, Singh, Chaudhuri, *diffGrad: An Optimization Method for Convolutional
    Neural Networks*, IEEE TNNLS 2020; the authors' second code. Their first, with which the paper's tables were made,
    compares the gradient with itself, and so is Adam at half the learning rate.
    """

    updates_alone = True
    _state_names = ("exp_avg", "exp_avg_sq", "previous_grad")

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, eps_corrected: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "eps_corrected": eps_corrected}
        super().__init__(params, settings, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("DiffGrad", settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        beta1, beta2 = options["betas"]
        if options["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=options["weight_decay"]))
        means, squares = states["exp_avg"], states["exp_avg_sq"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        if options["eps_corrected"]:
            torch._foreach_div_(denominators, options["root"])
        torch._foreach_add_(denominators, options["eps"])
        torch._foreach_mul_(denominators, _inverse_frictions(states["previous_grad"], grads))
        torch._foreach_copy_(states["previous_grad"], grads)
        add_quotients(params, means, denominators, options["scale"])

    @staticmethod
    def _step_numbers(step: Any, lr: Any, options: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = options["betas"]
        root, scale = (1 - beta2**step) ** 0.5, -lr / (1 - beta1**step)
        return {"root": root, "scale": scale if options["eps_corrected"] else scale * root}


def _inverse_frictions(previous: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return 1/ξ = 1 + exp(-|g_previous - g|): a factor of the denominator costs no division of its own."""
    found = list(torch._foreach_sub(previous, grads))
    torch._foreach_abs_(found)
    torch._foreach_neg_(found)
    if torch.compiler.is_compiling():  # which knows no list form of it, and would make it a pass of its own
        found = [negative.exp() for negative in found]
    else:
        torch._foreach_exp_(found)
    torch._foreach_add_(found, 1.0)
    return found


RECORD = OptimizerRecord(
    "diffgrad",
    DiffGrad,
    "Adam, slowed down where the gradient stands still",
    (kept("exp_avg"), kept("exp_avg_sq"), kept("previous_grad"), STEP),
    list_temporaries(lambda options: 2 + bool(options.get("weight_decay"))),
    paper="Dubey et al. 2020, arXiv:1909.11015",
    departs="eps beside the uncorrected second moment, as in the authors' second code",
)
