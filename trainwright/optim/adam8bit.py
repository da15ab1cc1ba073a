"""Adam and SGD with momentum, their moments in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .base import Lists, add_quotients, check_common, check_range
from .eight_bit import (
    BLOCK_SIZE,
    MIN_8BIT_SIZE,
    EightBit,
    eight_bit_groups,
    eight_bit_states,
    in_eight_bits,
    part_temporaries,
)
from .record import OptimizerRecord

ADAM_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
_MOMENTUM = {"momentum_buffer": True}
_PAPER = "Dettmers, Lewis, Shleifer & Zettlemoyer 2022, arXiv:2110.02861"


def update_moments(grads: list[Tensor], states: Lists, betas: tuple[float, float]) -> None:
    """Take the gradients into Adam's two running means."""
    torch._foreach_lerp_(states["exp_avg"], grads, 1 - betas[0])
    torch._foreach_mul_(states["exp_avg_sq"], betas[1])
    torch._foreach_addcmul_(states["exp_avg_sq"], grads, grads, 1 - betas[1])


def adam_roots(states: Lists, step: Any, options: dict[str, Any]) -> list[Tensor]:
    """Return √v̂ + ε."""
    roots = list(torch._foreach_sqrt(states["exp_avg_sq"]))
    torch._foreach_div_(roots, (1 - options["betas"][1] ** step) ** 0.5)
    torch._foreach_add_(roots, options["eps"])
    return roots


def _adamw(
    params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
) -> None:
    if options["weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
    update_moments(grads, states, options["betas"])
    roots = adam_roots(states, step, options)
    add_quotients(params, states["exp_avg"], roots, -lr / (1 - options["betas"][0] ** step))


def _momentum(
    params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
) -> None:
    buffers = states["momentum_buffer"]
    torch._foreach_mul_(buffers, options["momentum"])
    torch._foreach_add_(buffers, grads)
    if options["weight_decay"]:
        torch._foreach_add_(buffers, params, alpha=options["weight_decay"])
    torch._foreach_add_(params, torch._foreach_mul(buffers, -lr))


class AdamW8bit(EightBit):
    r"""AdamW whose two moments take one byte an element each, with a scale for every block of 256 elements.

        m, v ← from codes;    θ ← θ (1 - lr·λ)
        m ← β1 m + (1 - β1) g,    v ← β2 v + (1 - β2) g²
        θ ← θ - lr · m̂ / (√v̂ + ε)                     from m and v in fp32
        codes ← m, v, each block by its largest magnitude

    lr, betas, eps, weight_decay: AdamW's own, unchanged. block_size: elements a scale, at least 16; 2048 in the paper,
    256 since. min_8bit_size: parameters with fewer elements keep fp32 moments, as torch's AdamW would.

    For large models whose moments do not fit. Not for the weights of embeddings: see `eight_bit_groups`, and
    `trainwright.nn.StableEmbedding`. Elements with NaN or an infinity in the gradient are skipped and their moments
    forgotten. Shards of a parameter should be cut between blocks; resume with the same shards. Raises `UserError` for
    settings out of range.

    >>> weight = torch.nn.Parameter(torch.ones(64, 64))
    >>> optimizer = AdamW8bit([weight], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.full((64, 64), 3.0)
    >>> optimizer.step()
    >>> state = optimizer.state[weight]
    >>> round(weight[0, 0].item(), 6), state["exp_avg"].dtype, state["exp_avg_absmax"].shape
    (0.9, torch.uint8, torch.Size([16]))

    Source: Dettmers, Lewis, Shleifer, Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*, ICLR 2022, and
    bitsandbytes. Weight decay comes before the update, as in AdamW; its CUDA kernels apply it after, which differs by
    lr²·λ.
    """

    _moments = ADAM_MOMENTS
    _update = staticmethod(in_eight_bits(_adamw, ADAM_MOMENTS))

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, block_size: int = BLOCK_SIZE,
        min_8bit_size: float = MIN_8BIT_SIZE, **how: Any,
    ) -> None:  # fmt: skip
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "block_size": block_size, "min_8bit_size": min_8bit_size}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        super()._check_settings(settings)
        owner = type(self).__name__
        check_common(owner, settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])


class Adam8bit(AdamW8bit):
    """Adam with its moments in 8 bits: `AdamW8bit` without weight decay unless asked for, which then is decoupled too.

    As in the authors' kernels, where Adam and AdamW differ in that default alone; for decay through the gradient
    (torch's Adam), add it to the loss.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> Adam8bit([weight]).defaults["weight_decay"]
    0.0
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, block_size: int = BLOCK_SIZE,
        min_8bit_size: float = MIN_8BIT_SIZE, **how: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, block_size, min_8bit_size, **how)


class SGD8bit(EightBit):
    r"""SGD whose momentum takes one byte an element, with a scale for every block of 256 elements.

        s ← from codes;    s ← μ s + g + λθ;    θ ← θ - lr · s;    codes ← s

    lr: as SGD's. momentum: μ in (0, 1). weight_decay: λ, through the gradient. block_size, min_8bit_size: see
    `AdamW8bit`, as for gradients that are not finite, for shards and for errors.

    >>> weight = torch.nn.Parameter(torch.ones(64, 64))
    >>> optimizer = SGD8bit([weight], lr=0.1)
    >>> weight.grad = torch.full((64, 64), 3.0)
    >>> optimizer.step()
    >>> round(weight[0, 0].item(), 6)
    0.7

    Source: Dettmers et al. 2022; bitsandbytes, whose gradient has no factor 1 - μ either.
    """

    fused_flops = 39.0
    _moments = _MOMENTUM
    _update = staticmethod(in_eight_bits(_momentum, _MOMENTUM))

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-2, momentum: float = 0.9, weight_decay: float = 0.0,
        block_size: int = BLOCK_SIZE, min_8bit_size: float = MIN_8BIT_SIZE, **how: Any,
    ) -> None:  # fmt: skip
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "block_size": block_size, "min_8bit_size": min_8bit_size}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        super()._check_settings(settings)
        check_common("SGD8bit", settings["lr"], (), 0.0, settings["weight_decay"])
        check_range("SGD8bit", momentum=(settings["momentum"], "in (0, 1)", lambda value: 0.0 < value < 1.0))


def _record(name: str, cls: type[EightBit], summary: str, num_copies: float) -> OptimizerRecord:
    return OptimizerRecord(
        name,
        cls,
        summary,
        eight_bit_states(cls._moments),
        part_temporaries(num_copies),
        reads="block",
        paper=_PAPER,
        departs="weight decay before the update",
        groups=eight_bit_groups,
        one_kernel_on_gpu=True,
    )


RECORDS = (
    _record("adam8bit", Adam8bit, "Adam with moments of one byte an element", 6.25),
    _record("adamw8bit", AdamW8bit, "AdamW with moments of one byte an element", 6.25),
    _record("sgd8bit", SGD8bit, "SGD with momentum of one byte an element", 5.25),
)
