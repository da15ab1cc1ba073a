"""Losses. Over split samples the sum is partial and the count is the whole one; over a split vocabulary ranks cooperate."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import partial
from .elementwise import elementwise_signature
from .local import LocalContext, replace_arg
from .registry import WeightRule, rule
from .signature import Call, Signature, SignatureBuilder, broadcast_dims

MEAN, SUM = 1, 2


def _local_cross_entropy(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    values = {
        "weight": None,
        "reduction": MEAN,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        **dict(zip(names, args)),
        **kwargs,
    }
    if not ctx.split("t", "s0", "s1", "s2", "v"):
        return target, args, kwargs
    samples = ctx.group_of("t", "s0", "s1", "s2") if ctx.split("t", "s0", "s1", "s2") else None
    vocabulary = ctx.group_of("v") if ctx.split("v") else None
    start, stop = ctx.range_of("v")

    def partial_loss(logits: Any, labels: Any, weight: Any) -> Any:
        return partial.cross_entropy_over(
            samples,
            vocabulary,
            (start, stop, ctx.global_shape(0)[1 if len(ctx.global_shape(0)) > 1 else 0]),
            logits,
            labels,
            weight,
            values["reduction"],
            values["ignore_index"],
            values["label_smoothing"],
        )

    return partial_loss, (values["input"], values["target"], values["weight"]), {}


def _weight_of_labels(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of labels that count, or the sum of their classes' weights."""
    values = {**dict(zip(("input", "target", "weight", "reduction", "ignore_index"), args)), **kwargs}
    ignored = values.get("ignore_index", -100)
    return partial.label_weight(values["target"], values.get("weight"), ignored, torch.float64)


def _summed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = dict(kwargs)
    given.pop("reduction", None)
    if len(args) > 3:
        return (*args[:3], SUM, *args[4:]), given
    return args, {**given, "reduction": SUM}


@rule("cross_entropy_loss", localize=_local_cross_entropy, weight=WeightRule(_weight_of_labels, _summed))
def cross_entropy(call: Call) -> Signature | None:
    """`t v s*, t s*, v -> `: samples are a reduced loop (when averaged or summed), the vocabulary is split with care."""
    logits, labels, *weight = call.inputs
    if len(labels.shape) == len(logits.shape) or len(logits.shape) > 5:
        return None
    reduction = call.arg(3, "reduction", MEAN)
    builder = SignatureBuilder()
    smooth = call.arg(5, "label_smoothing", 0.0) != 0.0
    v_index = 1 if len(logits.shape) > 1 else 0
    t = builder.loop("t", logits.shape[0]) if v_index else ()
    v = builder.loop("v", logits.shape[v_index], whole=bool(weight) or smooth or len(logits.shape) > 2)
    space = tuple(builder.loop(f"s{k}", n) for k, n in enumerate(logits.shape[2:]))
    lead = (t,) if v_index else ()
    ins = [(*lead, v, *space), (*lead, *space)] + [(v,) for _ in weight]
    outs = [()] if reduction else [(*lead, *space)]
    reduced = ["t", *(f"s{k}" for k in range(len(space)))] if reduction else []
    return builder.build(ins, outs, reduced, averaged=reduction == MEAN, joint=["v"])


def _local_mean_loss(place: int):
    def localize(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        reduction = args[place] if len(args) > place else kwargs.get("reduction", MEAN)
        shape = ctx.global_shape(0)
        if reduction != MEAN or not ctx.split(*(f"d{k}" for k in range(len(shape)))):
            return target, args, kwargs
        count = math.prod(shape)
        summed, options = replace_arg(args, kwargs, place, "reduction", SUM)

        def partial_loss(*tensors: Any, **rest: Any) -> Any:
            return target(*tensors, **rest) / count

        return partial_loss, summed, options

    return localize


def _elementwise_loss(call: Call, place: int) -> Signature:
    if not call.arg(place, "reduction", MEAN):
        return elementwise_signature(call)
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    ins = [broadcast_dims(spec.shape, shape, builder) for spec in call.inputs]
    averaged = call.arg(place, "reduction", MEAN) == MEAN
    return builder.build(ins, [()], [f"d{k}" for k in range(len(shape))], averaged=averaged)


@rule("mse_loss", "l1_loss", "soft_margin_loss", localize=_local_mean_loss(2))
def pair_loss(call: Call) -> Signature:
    """`d*, d* -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 2)


@rule("smooth_l1_loss", "huber_loss", localize=_local_mean_loss(2))
def smooth_loss(call: Call) -> Signature:
    """`d*, d* -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 2)


@rule("binary_cross_entropy", localize=_local_mean_loss(3))
def binary_cross_entropy(call: Call) -> Signature:
    """`d*, d*, [d*] -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 3)


@rule("binary_cross_entropy_with_logits", localize=_local_mean_loss(4))
def binary_cross_entropy_with_logits(call: Call) -> Signature:
    """`d*, d*, [d*], [d*] -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 4)


@rule("kl_div", localize=_local_mean_loss(2))
def kl_div(call: Call) -> Signature:
    """`d*, d* -> `: every dim is a reduced loop."""
    return _elementwise_loss(call, 2)
