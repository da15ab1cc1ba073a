"""LAMB: Adam's direction, as long as the parameter says; its moments in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from ..numerics.shards import sum_over_shards
from .adam8bit import ADAM_MOMENTS, adam_roots, update_moments
from .base import Lists, check_common, check_range
from .batch import Batch
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


def _directions(
    params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
) -> None:
    """Write m̂ / (√v̂ + ε) into `params`."""
    update_moments(grads, states, options["betas"])
    torch._foreach_copy_(params, states["exp_avg"])
    torch._foreach_div_(params, adam_roots(states, step, options))
    torch._foreach_div_(params, 1 - options["betas"][0] ** step)


class LAMB8bit(EightBit):
    r"""Scale Adam's step by each parameter's own norm, for large batches; moments of one byte an element.

        u = m̂ / (√v̂ + ε) + λθ
        θ ← θ - lr · ‖θ‖ / ‖u‖ · u,    with 1 for the quotient where a norm is 0

    ‖·‖ is over the whole parameter, also where ranks hold shards of it. lr, betas, eps, weight_decay: as AdamW's, lr
    larger. max_unorm: if given, θ ← θ - lr · min(1, max_unorm · ‖θ‖ / ‖u‖) · u, which only shortens steps, as
    bitsandbytes does under this name. block_size, min_8bit_size: see `AdamW8bit`, as for gradients that are not finite
    (whose elements then have no direction but λθ), for shards and for errors. Not for small batches; no `fused` form.

    >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
    >>> optimizer = LAMB8bit([weight], lr=0.1)
    >>> weight.grad = torch.tensor([1.0, -1.0, 5.0, -5.0])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([1.8000, 2.2000, 1.8000, 2.2000])

    Source: You et al., *Large Batch Optimization for Deep Learning*, ICLR 2020; in 8 bits as Dettmers et al. 2022.
    """

    forms = ("foreach", "loop")
    _moments = ADAM_MOMENTS
    _update = staticmethod(in_eight_bits(_directions, ADAM_MOMENTS))

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, max_unorm: float | None = None, block_size: int = BLOCK_SIZE,
        min_8bit_size: float = MIN_8BIT_SIZE, **how: Any,
    ) -> None:  # fmt: skip
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_unorm": max_unorm}
        super().__init__(params, {**settings, "block_size": block_size, "min_8bit_size": min_8bit_size}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        super()._check_settings(settings)
        check_common("LAMB8bit", settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])
        words = "above 0, or None"
        check_range("LAMB8bit", max_unorm=(settings["max_unorm"], words, lambda value: value is None or value > 0))
        if settings.get("fused"):
            raise UserError("LAMB8bit needs two passes, for a norm between them; got fused=True; leave it out")

    def _step_group(self, group: dict[str, Any]) -> None:
        options = self._options(group)
        for batch in self._batches(group):
            updates = [torch.zeros_like(param) for param in batch.params]
            self._update(updates, batch.grads, batch.states, batch.step, group["lr"], options)
            if group["weight_decay"]:
                torch._foreach_add_(updates, batch.params, alpha=group["weight_decay"])
            torch._foreach_mul_(
                updates, [-group["lr"] * ratio for ratio in _ratios(batch, updates, group["max_unorm"])]
            )
            torch._foreach_add_(batch.params, updates)
            batch.write_back()
            del batch, updates  # before the next working copies come


def _ratios(batch: Batch, updates: list[Tensor], max_unorm: float | None) -> list[Tensor]:
    """Return what multiplies each parameter's update, a tensor without dimensions each."""
    found = []
    for owner, param, update in zip(batch.owners, batch.params, updates, strict=True):
        norms = torch.stack([torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)])
        own, length = sum_over_shards([(norms**2, owner)]).sqrt()
        if max_unorm is None:
            found.append(torch.where((own > 0) & (length > 0), own / length, 1.0))
        else:
            found.append(torch.where(length > 0, max_unorm * own / length, 1.0).clamp(max=1.0))
    return found


RECORD = OptimizerRecord(
    "lamb8bit",
    LAMB8bit,
    "LAMB with moments of one byte an element; for large batches",
    eight_bit_states(ADAM_MOMENTS),
    part_temporaries(6.25, num_whole=1),
    reads="block",  # and norms, which ranks sum,
    paper="You et al. 2020, arXiv:1904.00962; Dettmers et al. 2022, arXiv:2110.02861",
    departs="moments in 8 bits",
    groups=eight_bit_groups,
)
