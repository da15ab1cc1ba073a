"""Losses. Over split samples the sum is partial and the count is the whole one; over a split vocabulary ranks cooperate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import partial
from .elementwise import elementwise_signature
from .local import LocalContext, WithSum, replace_arg
from .registry import WeightRule, rule
from .signature import Call, Signature, SignatureBuilder, broadcast_dims

MEAN, SUM = 1, 2
_SAMPLES = ("t", "s0", "s1", "s2")


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss over labels by name, defaults included."""
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    defaults = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    return {**defaults, **dict(zip(names, args)), **kwargs}


def _class_dim(shape: Sequence[int]) -> int:
    return 1 if len(shape) > 1 else 0


def _local_cross_entropy(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    values = _given(args, kwargs)
    if not ctx.split(*_SAMPLES, "v"):
        return target, args, kwargs
    logits, labels = ctx.global_shape(0), ctx.global_shape(1)
    if len(logits) == len(labels):
        return _part_of_mean(target, args, kwargs, 3, math.prod(logits) // logits[_class_dim(logits)])
    vocabulary = ctx.group_of("v") if ctx.split("v") else None
    start, stop = ctx.range_of("v")

    def own_loss(own: Any, own_labels: Any, weight: Any) -> Any:
        return partial.cross_entropy_over(
            vocabulary,
            (start, stop, logits[_class_dim(logits)]),
            own,
            own_labels,
            weight,
            values["reduction"],
            values["ignore_index"],
            values["label_smoothing"],
        )

    return _over_labels(ctx, own_loss, values)


def _over_labels(ctx: LocalContext, own_loss: Any, values: dict[str, Any]):
    """A loss over labels as a local call: where it is a mean, that over the labels of all ranks that have some."""
    args = values["input"], values["target"], values["weight"]
    if values["reduction"] != MEAN:
        return own_loss, args, {}

    def label_weight(labels: Any, weight: Any) -> Any:
        return partial.label_weight(labels, weight, values["ignore_index"])

    def share_of_mean(count: Any, *tensors: Any) -> Any:
        return partial.mean_of(own_loss(*tensors), count)

    if not ctx.split(*_SAMPLES):
        return (lambda *tensors: share_of_mean(label_weight(*tensors[1:]), *tensors)), args, {}
    return WithSum(share_of_mean, label_weight, (1, 2), ctx.group_of(*_SAMPLES)), args, {}


def _weight_of_labels(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of labels that count, or the sum of their classes' weights; of probabilities, the number of samples."""
    values = _given(args, kwargs)
    labels = values["target"]
    if labels.is_floating_point():
        return torch.tensor(labels.numel() / labels.shape[_class_dim(labels.shape)], dtype=torch.float64)
    return partial.label_weight(labels, values["weight"], values["ignore_index"])


def _summed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = dict(kwargs)
    given.pop("reduction", None)
    if len(args) > 3:
        return (*args[:3], SUM, *args[4:]), given
    return args, {**given, "reduction": SUM}


@rule("cross_entropy_loss", localize=_local_cross_entropy, weight=WeightRule(_weight_of_labels, _summed))
def cross_entropy(call: Call) -> Signature | None:
    """`t v s*, t s*, v -> `: samples are a reduced loop (when averaged or summed), the vocabulary is split with care.

    Labels may be probabilities, `t v s*`: the vocabulary is whole then.
    """
    smooth = call.arg(5, "label_smoothing", 0.0) != 0.0
    return _of_labels(call, whole_classes=smooth or len(call.inputs[0].shape) > 2)


def _local_nll(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    values = _given(args, kwargs)
    if not ctx.split(*_SAMPLES):
        return target, args, kwargs

    def own_loss(log_probabilities: Any, labels: Any, weight: Any) -> Any:
        name = "sum" if values["reduction"] else "none"
        return F.nll_loss(log_probabilities, labels, weight, None, values["ignore_index"], None, name)

    return _over_labels(ctx, own_loss, values)


@rule("nll_loss_nd", localize=_local_nll, weight=WeightRule(_weight_of_labels, _summed))
def nll_loss(call: Call) -> Signature | None:
    """`t v s*, t s*, v -> `: samples are a reduced loop, classes stay whole."""
    return _of_labels(call, whole_classes=True)


def _of_labels(call: Call, whole_classes: bool) -> Signature | None:
    logits, labels, *weight = call.inputs
    if len(logits.shape) > 5:
        return None
    are_probabilities = len(labels.shape) == len(logits.shape)
    reduction = call.arg(3, "reduction", MEAN)
    builder = SignatureBuilder()
    v_index = _class_dim(logits.shape)
    t = builder.loop("t", logits.shape[0]) if v_index else ()
    v = builder.loop("v", logits.shape[v_index], whole=bool(weight) or whole_classes or are_probabilities)
    space = tuple(builder.loop(f"s{k}", n) for k, n in enumerate(logits.shape[2:]))
    lead = (t,) if v_index else ()
    of_labels = (*lead, v, *space) if are_probabilities else (*lead, *space)
    ins = [(*lead, v, *space), of_labels] + [(v,) for _ in weight]
    outs = [()] if reduction else [(*lead, *space)]
    reduced = ["t", *(f"s{k}" for k in range(len(space)))] if reduction else []
    return builder.build(ins, outs, reduced, averaged=reduction == MEAN, joint=["v"])


def _local_mean_loss(place: int):
    def localize(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        shape = ctx.global_shape(0)
        if not ctx.split(*(f"d{k}" for k in range(len(shape)))):
            return target, args, kwargs
        return _part_of_mean(target, args, kwargs, place, math.prod(shape))

    return localize


def _part_of_mean(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int, count: int):
    """The rank's share of a loss, which is a mean over `count` entries of the whole if it is one."""
    reduction = args[place] if len(args) > place else kwargs.get("reduction", MEAN)
    if reduction != MEAN:
        return target, args, kwargs
    summed, options = replace_arg(args, kwargs, place, "reduction", SUM)

    def partial_loss(*tensors: Any, **rest: Any) -> Any:
        return target(*tensors, **rest) / count

    return partial_loss, summed, options


def _elementwise_loss(call: Call, place: int) -> Signature | None:
    if not call.arg(place, "reduction", MEAN):
        return elementwise_signature(call)
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    if torch.broadcast_shapes(*(spec.shape for spec in call.inputs)) != shape:
        return None  # the mean is over more entries than the first argument has
    ins = [broadcast_dims(spec.shape, shape, builder) for spec in call.inputs]
    averaged = call.arg(place, "reduction", MEAN) == MEAN
    return builder.build(ins, [()], [f"d{k}" for k in range(len(shape))], averaged=averaged)


@rule("mse_loss", "l1_loss", "soft_margin_loss", localize=_local_mean_loss(2))
def pair_loss(call: Call) -> Signature | None:
    """`d*, d* -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 2)


@rule("smooth_l1_loss", "huber_loss", localize=_local_mean_loss(2))
def smooth_loss(call: Call) -> Signature | None:
    """`d*, d* -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 2)


@rule("binary_cross_entropy", "hinge_embedding_loss", localize=_local_mean_loss(3))
def binary_cross_entropy(call: Call) -> Signature | None:
    """`d*, d*, [d*] -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 3)


@rule("binary_cross_entropy_with_logits", "margin_ranking_loss", localize=_local_mean_loss(4))
def binary_cross_entropy_with_logits(call: Call) -> Signature | None:
    """`d*, d*, [d*], [d*] -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 4)


@rule("kl_div", localize=_local_mean_loss(2))
def kl_div(call: Call) -> Signature | None:
    """`d*, d* -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 2)


@rule("poisson_nll_loss", localize=_local_mean_loss(5))
def poisson_nll_loss(call: Call) -> Signature | None:
    """`d*, d* -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 5)
