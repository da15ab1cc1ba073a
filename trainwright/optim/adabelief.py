"""AdaBelief: Adam's form, the second moment taken of the gradient's distance from its own running mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .base import Lists, Method, check_common


class AdaBelief(Method):
    r"""(prototype)"""

    _state_names = ("exp_avg", "exp_avg_var")

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-16, weight_decay: float = 0.0, **how: Any) -> None:  # fmt: skip
        check_common("AdaBelief", lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **how)

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        (beta1, beta2), eps = options["betas"], options["eps"]
        if options["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
        means, variances = states["exp_avg"], states["exp_avg_var"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        distances = torch._foreach_sub(grads, means)
        torch._foreach_mul_(variances, beta2)
        torch._foreach_addcmul_(variances, distances, distances, 1 - beta2)
        torch._foreach_add_(variances, eps)
        denominators = torch._foreach_sqrt(variances)
        torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominators, eps)
        updates = torch._foreach_div(means, denominators)
        torch._foreach_mul_(updates, -lr / (1 - beta1**step))
        torch._foreach_add_(params, updates)
