"""Normalisations and softmax: the normalised dims stay whole, all others are loops."""

from __future__ import annotations

from typing import Any

from . import partial
from .local import LocalContext
from .registry import rule
from .signature import Call, Signature, SignatureBuilder
from .views import same_dims


@rule("layer_norm", "native_layer_norm", "rms_norm", kind="elementwise")
def layer_norm(call: Call) -> Signature:
    """`d* n, n, n -> d* n` with the normalised dims `n` whole."""
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    count = len(call.arg(1, "normalized_shape"))
    lead = len(shape) - count
    dims = same_dims(shape, builder, whole=range(lead, len(shape)))
    outs = [dims] + [dims[:lead] + ((),) * count for _ in call.outputs[1:]]
    return builder.build([dims] + [dims[lead:] for _ in call.inputs[1:]], outs)


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "softmin", "logsumexp", kind="elementwise")
def softmax(call: Call) -> Signature:
    """Normalises along one dim, which stays whole."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    dim = call.arg(1, "dim", -1)
    axes = {axis % max(1, len(shape)) for axis in ([dim] if isinstance(dim, int) else dim)}  # a number has dim 0 too
    dims = same_dims(shape, builder, whole=sorted(axes))
    if len(out) == len(shape):
        outs = tuple(dims[k] if n == shape[k] else () for k, n in enumerate(out))
    else:
        outs = tuple(entry for k, entry in enumerate(dims) if k not in axes)
    return builder.build([dims], [outs])


@rule("group_norm", "native_group_norm")
def group_norm(call: Call) -> Signature:
    """`n c *, c, c -> n c *`: only samples are independent of one another."""
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    dims = same_dims(shape, builder, whole=range(1, len(shape)))
    return builder.build([dims] + [(dims[1],) for _ in call.inputs[1:]], [dims for _ in call.outputs[:1]])


def _local_batch_norm(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Statistics over the whole batch, as one process would take them."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
    values = dict(zip(names, args), **kwargs)
    if not ctx.split("d0") or not values["training"]:
        return target, args, kwargs
    group, shape = ctx.group_of("d0"), ctx.global_shape(0)
    count = shape[0]
    for size in shape[2:]:
        count *= size

    def synchronized(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *rest
    ):
        if not training:
            return target(x, weight, bias, mean, var, training, momentum, eps, False)
        return partial.batch_norm_over(group, count, x, weight, bias, mean, var, momentum, eps)

    return synchronized, tuple(values[name] for name in names[:8] if name in values), {}


_RUNNING = (3, 4)
"""The running mean and variance, which training writes and does not normalise by."""


@rule("batch_norm", localize=_local_batch_norm, scratch=_RUNNING)
def batch_norm(call: Call) -> Signature | None:
    """`n c *, c, c, c, c -> n c *`: split over samples, the statistics are summed over the ranks."""
    if len(call.outputs) != 1:
        return None
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    dims = same_dims(shape, builder, whole=range(1, len(shape)))
    joint = ["d0"] if call.arg(5, "training", False) else []
    return builder.build([dims] + [(dims[1],) for _ in call.inputs[1:]], [dims], joint=joint)


@rule("instance_norm", scratch=_RUNNING)
def instance_norm(call: Call) -> Signature:
    """`n c *, c, … -> n c *`: samples are independent unless running statistics are kept."""
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    first = 0 if len(call.inputs) > 3 else 1
    dims = same_dims(shape, builder, whole=range(first, len(shape)))
    return builder.build([dims] + [(dims[1],) for _ in call.inputs[1:]], [dims])


@rule("normalize", kind="elementwise")
def normalize(call: Call) -> Signature:
    """Scales along one dim, which stays whole."""
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    dims = same_dims(shape, builder, whole=(call.arg(2, "dim", 1) % len(shape),))
    return builder.build([dims], [dims])


@rule("_weight_norm")
def weight_norm(call: Call) -> Signature:
    """`d* o, o -> d* o`: each slice along one dim is scaled to a length of its own, and its other dims stay whole."""
    builder = SignatureBuilder()
    shape, dim = call.inputs[0].shape, call.arg(2, "dim", 0)
    dims = same_dims(shape, builder, whole=[k for k in range(len(shape)) if k != dim])
    lengths = tuple(dims[k] if k == dim else () for k in range(len(call.inputs[1].shape)))
    return builder.build([dims, lengths], [dims])
