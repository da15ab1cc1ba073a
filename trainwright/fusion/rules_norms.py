"""Rules of norms and pools over channels, and of losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .array import Fused, functions_named, num_models, raw_of, rules
from .rules_elementwise import aligned
from .rules_products import folded, unfolded

_POOLS = "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool"
_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
    "poisson_nll_loss",
)  # fmt: skip


def _batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    num = num_models(input, running_mean, weight, bias)
    raw = raw_of(input, num)
    of_features = raw.dim() == 3  # [B, N, C]
    mean, var, scale, shift = (
        None if each is None else raw_of(each, num).reshape(-1) for each in (running_mean, running_var, weight, bias)
    )
    found = F.batch_norm(folded(raw), mean, var, scale, shift, training, momentum, eps)
    return Fused(found.unflatten(1, (num, -1)).transpose(0, 1) if of_features else unfolded(found, num))


def _layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    if type(input) is not Fused:
        return Fused(
            _affine(F.layer_norm(input, normalized_shape, None, None, eps).unsqueeze(0), weight, bias, input.dim())
        )
    return Fused(_affine(F.layer_norm(input.raw, normalized_shape, None, None, eps), weight, bias, input.dim()))


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    raw = input.raw if type(input) is Fused else input.unsqueeze(0)
    return Fused(_affine(F.rms_norm(raw, normalized_shape, None, eps), weight, None, input.dim()))


def _affine(raw: Any, weight: Any, bias: Any, rank: int) -> Any:
    scale, shift = (None if each is None else _behind(each, rank) for each in (weight, bias))
    if scale is not None and shift is not None:
        return torch.addcmul(shift, raw, scale)
    raw = raw if scale is None else raw * scale
    return raw if shift is None else raw + shift


def _behind(value: Any, rank: int) -> Any:
    if type(value) is not Fused:
        return value
    return value.raw.reshape(value.raw.shape[0], *(1,) * (rank - value.dim()), *value.shape)


def _group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    num = num_models(input, weight, bias)
    scale, shift = (None if each is None else raw_of(each, num).reshape(-1) for each in (weight, bias))
    return Fused(unfolded(F.group_norm(folded(raw_of(input, num)), num * num_groups, scale, shift, eps), num))


rules.update({F.batch_norm: _batch_norm, F.layer_norm: _layer_norm, F.group_norm: _group_norm, F.rms_norm: _rms_norm})
rules.update({torch.layer_norm: _layer_norm, torch.group_norm: _group_norm, torch.rms_norm: _rms_norm})


def _pool(func: Any, dims: int) -> Callable[..., Any]:
    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not Fused or input.dim() != dims + 2:
            return NotImplemented
        num, found = len(input.raw), func(folded(input.raw), *args, **kwargs)
        return (
            tuple(Fused(unfolded(each, num)) for each in found)
            if isinstance(found, tuple)
            else Fused(unfolded(found, num))
        )

    return run


for _kind in _POOLS.split():
    for _dims in (1, 2, 3):
        for _name in (f"{_kind}{_dims}d", f"{_kind}{_dims}d_with_indices"):
            for _func in functions_named(_name):
                rules[_func] = _pool(_func, _dims)


def _loss(func: Any) -> Callable[..., Any]:
    """A loss of elements: its values, and then each model's own sum or mean."""

    def run(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if args or any(type(each) is Fused for each in kwargs.values()) or kwargs.get("weight") is not None:
            return NotImplemented
        if any(kwargs.pop(key, None) is not None for key in ("size_average", "reduce")) or input.shape != target.shape:
            return NotImplemented
        how = kwargs.pop("reduction", "mean")
        values = Fused(func(*torch.broadcast_tensors(*aligned((input, target))), reduction="none", **kwargs))
        if how == "batchmean":
            return values.sum() / input.shape[0]
        return values if how == "none" else values.sum() if how == "sum" else values.mean()

    return run


for _name in _LOSSES:
    rules[getattr(F, _name)] = _loss(getattr(F, _name))


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Rows of all models at once; a mean divides by each model's own number of rows that count."""
    if size_average is not None or reduce is not None or weight is not None:
        return NotImplemented
    num, classes_at = num_models(input, target), 1 if input.dim() > 1 else 0
    if classes_at == 0:
        return NotImplemented
    logits, labels = raw_of(input, num).flatten(0, 1), raw_of(target, num).flatten(0, 1)
    values = F.cross_entropy(
        logits, labels, None, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    values = values.reshape(num, -1)
    if reduction == "none":
        return Fused(values.reshape(num, *input.shape[:1], *input.shape[2:]))
    if reduction == "sum":
        return Fused(values.sum(1))
    if target.is_floating_point():
        return Fused(values.sum(1) / math.prod((input.shape[0], *input.shape[2:])))
    counted = (raw_of(target, num).reshape(num, -1) != ignore_index).sum(1)
    return Fused(values.sum(1) / counted)


def _nll(input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
         reduction: str = "mean") -> Any:  # fmt: skip
    if size_average is not None or reduce is not None or weight is not None or input.dim() < 2:
        return NotImplemented
    num = num_models(input, target)
    values = F.nll_loss(
        raw_of(input, num).flatten(0, 1), raw_of(target, num).flatten(0, 1), ignore_index=ignore_index, reduction="none"
    )
    values = values.reshape(num, -1)
    if reduction == "none":
        return Fused(values.reshape(num, *input.shape[:1], *input.shape[2:]))
    counted = (raw_of(target, num).reshape(num, -1) != ignore_index).sum(1)
    return Fused(values.sum(1) if reduction == "sum" else values.sum(1) / counted)


rules.update({F.cross_entropy: _cross_entropy, F.nll_loss: _nll})
