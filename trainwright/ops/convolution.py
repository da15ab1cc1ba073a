"""Convolutions and pooling: samples and channels are loops, space stays whole."""

from __future__ import annotations

from typing import Any

from . import partial
from .local import LocalContext
from .matmul import add_bias_once
from .registry import rule
from .signature import Call, Dims, Signature, SignatureBuilder


def _space(shape: tuple[int, ...], builder: SignatureBuilder, prefix: str) -> Dims:
    return tuple(builder.loop(f"{prefix}{k}", n, whole=True) for k, n in enumerate(shape))


_bias_once = add_bias_once(2, "bias", "i")


def _local(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Rewrite the call for a rank that may have none of the input channels, and so that one rank alone adds the bias."""
    if 0 in ctx.in_shape(1) and 0 not in ctx.out_shape():
        shape = ctx.out_shape()

        def target(x: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any) -> Any:
            return partial.convolution_without_channels(shape, x, weight, bias)

    return _bias_once(ctx, target, args, kwargs)


@rule(
    *("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    localize=_local,
)
def convolution(call: Call) -> Signature | None:
    """`n i *, o i *, o -> n o *` (weights `i o *` when transposed); with groups only samples are split."""
    if not isinstance(call.arg(3, "stride", 1), (int, list, tuple)):
        return None
    shape, weight, out = call.inputs[0].shape, call.inputs[1].shape, call.outputs[0].shape
    if len(shape) != len(weight):
        return None
    transposed = "transpose" in call.name or (call.name == "convolution" and bool(call.arg(6, "transposed", False)))
    place = {"convolution": 8}.get(call.name, 6)
    groups = call.arg(place, "groups", 1)
    builder = SignatureBuilder()
    grouped = groups != 1
    n = builder.loop("n", shape[0])
    i = builder.loop("i", shape[1], whole=grouped)
    o = builder.loop("o", out[1], whole=grouped)
    channels: Dims = (i, o) if transposed else (o, i)
    if grouped:
        channels = tuple(builder.loop(f"g{k}", weight[k], whole=True) for k in range(2))
    ins = [(n, i, *_space(shape[2:], builder, "x")), (*channels, *_space(weight[2:], builder, "k"))]
    if len(call.inputs) == 3:
        ins.append((o,))
    return builder.build(ins, [(n, o, *_space(out[2:], builder, "y"))], ["i"], once=(2,))


@rule(
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices"),
    *(
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool2d",
        "adaptive_max_pool1d",
    ),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d"),
    *("upsample_nearest_exact1d", "upsample_nearest_exact2d", "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d"),
    *(
        "reflection_pad2d",
        "replication_pad1d",
        "replication_pad2d",
        "im2col",
        "col2im",
        "_adaptive_avg_pool2d",
        "channel_shuffle",
    ),
)
def pooling(call: Call) -> Signature | None:
    """`n c * -> n c *`: samples, and channels where their number stays, are loops."""
    shape = call.inputs[0].shape
    builder = SignatureBuilder()
    if any(len(spec.shape) != len(shape) and call.name != "im2col" for spec in call.outputs) or len(call.inputs) > 1:
        return None
    n = builder.loop("n", shape[0])
    same = all(spec.shape[1] == shape[1] for spec in call.outputs) and call.name != "channel_shuffle"
    c = builder.loop("c", shape[1], whole=not same)
    outs = []
    for index, spec in enumerate(call.outputs):
        own = c if same else builder.loop(f"c{index}", spec.shape[1], whole=True)
        outs.append((n, own, *_space(spec.shape[2:], builder, f"y{index}_")))
    return builder.build([(n, c, *_space(shape[2:], builder, "x"))], outs)
