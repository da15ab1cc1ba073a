"""Adafactor with clipping: a second moment of one row and one column a matrix, and the gradient's largest coordinates clipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .base import Lists, Method, check_common, check_range, working_dtype
from .batch import real
from .clipped import check_clipping, clipped, clipping_temporaries, gradient_threshold
from .record import STEP, OptimizerRecord, StateTensor

_FACTORS, _WHOLE = ("row_var", "col_var"), ("variance",)


class ClippedAdafactor(Method):
    r"""Adafactor whose numerator takes the clipped gradient and whose second moment takes the raw one.

        β = 1 − t^decay,   R ← β R + (1 − β) mean_columns(g² + ε₁),   C ← β C + (1 − β) mean_rows(g² + ε₁)
        v = R Cᵀ / mean(R)   (tensors of less than two dimensions: v ← β v + (1 − β)(g² + ε₁))
        u = ĝ / √v,   u ← u / max(1, rms(u) / max_rms)
        θ ← θ (1 − lr·λ) − lr · max(ε₂, rms(θ)) · u

    ĝ as in `ClippedSGD`. clip: k, the share of coordinates clipped; 0.5 for Adafactor, 0 clips none. decay: below 0.
    max_rms: of an update. eps: ε₁, ε₂. Tensors of more dimensions are stacks of matrices of the last two. State: a row and a
    column a matrix. No first moment. Not for shards of a matrix, whose means are of the whole. Raises `UserError` for settings
    out of range.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> weight.grad = torch.tensor([[4.0, 4.0], [1.0, 1.0]])
    >>> ClippedAdafactor([weight], lr=0.1, clip=0.0).step()
    >>> weight.detach()
    tensor([[0.9000, 0.9000],
            [0.9000, 0.9000]])

    Source: Shazeer, Stern, *Adafactor*, 2018; its clipped form: Pan, Li, *Toward Understanding Why Adam Converges Faster
    Than SGD for Transformers*, 2023. It departs in that lr is given, and weight decay decoupled.
    """

    forms = ("foreach", "loop")

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-2, clip: float = 0.5, decay: float = -0.8,
                 max_rms: float = 1.0, eps: tuple[float, float] = (1e-30, 1e-3), weight_decay: float = 0.0, *,
                 threshold_scale: float = 1.0, **how: Any) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "clip": clip, "decay": decay, "max_rms": max_rms, "eps": eps, "weight_decay": weight_decay,
            "threshold_scale": threshold_scale,
        }  # fmt: skip
        super().__init__(params, defaults, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("ClippedAdafactor", settings["lr"], (), 0.0, settings["weight_decay"])
        check_clipping("ClippedAdafactor", settings)
        check_range(
            "ClippedAdafactor",
            decay=(settings["decay"], "below 0", lambda value: value < 0),
            max_rms=(settings["max_rms"], "above 0", lambda value: value > 0),
            eps=(settings["eps"], "two numbers of at least 0", lambda value: len(value) == 2 and min(value) >= 0),
            fused=(settings["fused"], "False, for means stand between its passes", lambda value: not value),
        )

    def _state_keys(self) -> tuple[str, ...]:
        return (*_FACTORS, *_WHOLE)

    def _names_of(self, param: Tensor, group: dict[str, Any]) -> Iterable[str]:
        return _FACTORS if real(param.detach()).ndim > 1 else _WHOLE

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        shape, dtype = real(param.detach()).shape, working_dtype(real(param.detach()).dtype)
        shapes = {"variance": shape}
        if len(shape) > 1:
            shapes = {"row_var": shape[:-1], "col_var": shape[:-2] + shape[-1:]}
        return {name: torch.zeros(own, dtype=dtype, device=param.device) for name, own in shapes.items()}

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**super()._options(group), "threshold": gradient_threshold(group)}

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        for index, (param, grad) in enumerate(zip(params, grads)):
            roots = _roots(grad, {name: own[index] for name, own in states.items()}, step, options)
            (update,) = clipped([grad], options["threshold"])
            update.div_(roots)
            scale = lr * _rms(param).clamp(min=options["eps"][1])
            update.mul_(-scale / (_rms(update) / options["max_rms"]).clamp(min=1.0))
            if options["weight_decay"]:
                param.mul_(1 - lr * options["weight_decay"])
            param.add_(update)


def _roots(grad: Tensor, state: dict[str, Tensor], step: Any, options: dict[str, Any]) -> Tensor:
    """Take the squared gradient into the second moment, and return √v."""
    fresh, squares = step ** options["decay"], grad.square().add_(options["eps"][0])
    if "variance" in state:
        state["variance"].lerp_(squares, fresh)
        return state["variance"].sqrt()
    if not squares.numel():
        return squares
    rows, columns = state["row_var"], state["col_var"]
    rows.lerp_(squares.mean(-1), fresh)
    columns.lerp_(squares.mean(-2), fresh)
    del squares
    return torch.mul((rows / rows.mean(-1, keepdim=True)).unsqueeze(-1), columns.unsqueeze(-2)).sqrt_()


def _rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / max(1, tensor.numel()) ** 0.5


RECORD = OptimizerRecord(
    "clippedadafactor",
    ClippedAdafactor,
    "Adafactor whose numerator takes the gradient with its largest coordinates clipped; nearly no state",
    (
        StateTensor("row_var", lambda shape, options: shape[:-1] if len(shape) > 1 else None, wide=True),
        StateTensor("col_var", lambda shape, options: (*shape[:-2], shape[-1]) if len(shape) > 1 else None, wide=True),
        StateTensor("variance", lambda shape, options: shape if len(shape) < 2 else None, wide=True),
        STEP,
    ),
    clipping_temporaries(2),
    defaults={"clip": 0.5},
    reads="matrix",
    paper="Pan, Li 2023, arXiv:2306.00204",
    departs="lr is given, weight decay decoupled",
    not_on_shards="takes means over rows and columns, of which each rank holds a part",
)
