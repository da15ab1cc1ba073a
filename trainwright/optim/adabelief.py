"""AdaBelief: Adam's form, the second moment taken of the gradient's distance from its own running mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .base import Lists, Method, add_quotients, check_common
from .record import STEP, OptimizerRecord, Options, kept, list_temporaries


class AdaBelief(Method):
    r"""Take long steps where the gradient is what its running mean predicts, short ones where it is not.

        θ ← θ (1 - lr·λ)
        m ← β1 m + (1 - β1) g
        s ← β2 s + (1 - β2) (g - m)² + ε
        θ ← θ - lr · m / (1 - β1^t) / (√(s / (1 - β2^t)) + ε)

    lr: of the same size as Adam's. betas: decay of m and s, in [0, 1). eps: about the square of Adam's, because it is
    added to s; s settles at ε / (1 - β2) at least. weight_decay: λ, which multiplies lr unless `fixed_decay`
    (θ ← θ (1 - λ)); with `decoupled=False`, λθ is added to the gradient instead. rectify: as RAdam does, take no
    denominator, but steps along m / (1 - β1^t), or with `degenerated_to_sgd=False` none at all, until the variance of s
    can be trusted, at the sixth step for β2 = 0.999. amsgrad: divide by the root of the largest s so far.
    eps_accumulate: whether ε stays in s from step to step; the authors did not mean it to, but all their results are
    with it.

    Recommended by the authors: for convolutional networks on small images eps=1e-8, decoupled=False, rectify=False; on
    ImageNet eps=1e-8, rectify=False, weight_decay=1e-2; for transformers the defaults with lr=5e-4, weight_decay=1e-4;
    for adversarial networks eps=1e-12, rectify=False.

    Gradients clipped by value are not for this method: a clipped gradient stands still, g - m vanishes, and the step
    explodes; clip by norm. A gradient with NaN makes its elements NaN for good. Raises `UserError` for settings out of
    range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = AdaBelief([weight], lr=0.09, rectify=False)
    >>> weight.grad = torch.tensor([0.5, -8.0])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([ 0.9000, -1.9000])

    Source: Zhuang, Tang, Ding, Tatikonda, Dvornek, Papademetris, Duncan, *AdaBelief Optimizer: Adapting Stepsizes by the
    Belief in Observed Gradients*, NeurIPS 2020; adabelief-pytorch 0.2.1, whose defaults these are. State stays in fp32
    for bf16 and fp16 parameters, which are not cast themselves.
    """

    updates_alone = True
    _state_names = ("exp_avg", "exp_avg_var")

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16, weight_decay: float = 0.0, decoupled: bool = True, fixed_decay: bool = False,
        rectify: bool = True, degenerated_to_sgd: bool = True, amsgrad: bool = False, eps_accumulate: bool = True,
        **how: Any,
    ) -> None:  # fmt: skip
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        decay = {"decoupled": decoupled, "fixed_decay": fixed_decay}
        rectification = {"rectify": rectify, "degenerated_to_sgd": degenerated_to_sgd}
        variance = {"amsgrad": amsgrad, "eps_accumulate": eps_accumulate}
        super().__init__(params, {**settings, **decay, **rectification, **variance}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("AdaBelief", settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (*self._state_names, "max_exp_avg_var") if group["amsgrad"] else self._state_names

    def _state_keys(self) -> tuple[str, ...]:
        return (*self._state_names, "max_exp_avg_var")

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        grads = _with_decay(params, grads, options)
        (beta1, beta2), means = options["betas"], states["exp_avg"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        distances = torch._foreach_sub(grads, means)
        torch._foreach_mul_(states["exp_avg_var"], beta2)
        torch._foreach_addcmul_(states["exp_avg_var"], distances, distances, 1 - beta2)
        del distances
        denominators = _roots(states, options)
        if not options["rectify"]:
            torch._foreach_div_(denominators, options["root"])
        torch._foreach_add_(denominators, options["eps"])
        if options["rectify"]:
            torch._foreach_mul_(denominators, options["trusted"])
            torch._foreach_add_(denominators, [1 - options["trusted"]] * len(denominators))
        add_quotients(params, means, denominators, options["scale"])

    @staticmethod
    def _step_numbers(step: Any, lr: Any, options: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = options["betas"]
        kept = 1 - (1.0 if options["fixed_decay"] else lr) * options["weight_decay"]
        found = {"kept": kept, "scale": -lr / (1 - beta1**step), "root": (1 - beta2**step) ** 0.5}
        if options["rectify"]:
            trusted, ratio = _variance_ratio(beta2, step)
            factor = ratio**0.5 + (1 - trusted) * float(options["degenerated_to_sgd"])
            found |= {"trusted": trusted, "scale": found["scale"] * factor}
        return found


def _with_decay(params: list[Tensor], grads: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Apply weight decay to the parameters, or return gradients that contain it."""
    decay = options["weight_decay"]
    if not decay:
        return grads
    if not options["decoupled"]:
        return list(torch._foreach_add(grads, params, alpha=decay))
    torch._foreach_mul_(params, options["kept"])
    return grads


def _roots(states: Lists, options: dict[str, Any]) -> list[Tensor]:
    """Return √(s + ε), or that of the largest so far."""
    variances = states["exp_avg_var"]
    if options["eps_accumulate"]:
        torch._foreach_add_(variances, options["eps"])
        shifted = variances
    else:
        shifted = list(torch._foreach_add(variances, options["eps"]))
    if options["amsgrad"]:
        torch._foreach_maximum_(states["max_exp_avg_var"], shifted)
        shifted = states["max_exp_avg_var"]
    return list(torch._foreach_sqrt(shifted))


def _variance_ratio(beta2: float, step: Any) -> tuple[Any, Any]:
    """Return whether s is an average over at least 5 gradients (1 or 0), and if so RAdam's squared factor, else 0.

    Without branches on `step`, which is a tensor where it may not be read.
    """
    at_last = 2 / (1 - beta2) - 1
    if at_last < 5:
        return 0.0, 0.0
    decayed = beta2**step
    at_step = at_last - 2 * step * decayed / (1 - decayed)
    trusted = (at_step >= 5) * 1.0
    spread = (at_step - 4) * (at_step - 2) * at_last / ((at_last - 4) * (at_last - 2) * at_step)
    return trusted, trusted * (1 - decayed) * spread


def _num_copies(options: Options) -> int:
    coupled = options.get("weight_decay") and not options.get("decoupled", True)
    apart = not options.get("eps_accumulate", True) and not options.get("amsgrad")
    return 1 + bool(coupled) + bool(apart)


RECORD = OptimizerRecord(
    "adabelief",
    AdaBelief,
    "Adam that divides by the gradient's deviation from its mean",
    (kept("exp_avg"), kept("exp_avg_var"), kept("max_exp_avg_var", option="amsgrad"), STEP),
    list_temporaries(_num_copies),
    paper="Zhuang et al. 2020, arXiv:2010.07468",
    departs="eps stays in the second moment, as in the authors' code",
)
