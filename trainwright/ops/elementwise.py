"""Elementwise ops: every dim of the output is a loop; operands broadcast."""

from __future__ import annotations

from .registry import rule
from .signature import Call, Signature, SignatureBuilder, broadcast_dims

UNARY = [
    "abs",
    "neg",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "square",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erfinv",
    "sigmoid",
    "logit",
    "relu",
    "relu6",
    "gelu",
    "silu",
    "mish",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "softsign",
    "tanhshrink",
    "hardshrink",
    "softshrink",
    "log_sigmoid",
    "threshold",
    "ceil",
    "floor",
    "round",
    "trunc",
    "frac",
    "sign",
    "sgn",
    "clamp",
    "clamp_min",
    "clamp_max",
    "clip",
    "nan_to_num",
    "isnan",
    "isinf",
    "isfinite",
    "logical_not",
    "bitwise_not",
    "to",
    "_to_copy",
    "type_as",
    "clone",
    "contiguous",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "dropout",
    "alpha_dropout",
    "feature_dropout",
    "bernoulli",
    "lift_fresh_copy",
    "alias_copy",
    "positive",
    "native_dropout",
    "fill",
    "masked_fill",
    "heaviside",
    "copysign",
    "digamma",
    "lgamma",
    "i0",
    "sinc",
    "deg2rad",
    "rad2deg",
    "real",
    "imag",
    "angle",
    "conj",
    "_conj",
    "conj_physical",
    "resolve_conj",
    "resolve_neg",
    "complex",
    "polar",
    "sigmoid_backward",
    "glu_jvp",
    "rrelu",
    "rrelu_with_noise",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "pow",
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "true_divide",
    "floor_divide",
    "remainder",
    "fmod",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "__and__",
    "__or__",
    "__xor__",
    "where",
    "lerp",
    "addcmul",
    "addcdiv",
    "atan2",
    "hypot",
    "xlogy",
    "nextafter",
    "prelu_kernel",
    "logaddexp",
    "logaddexp2",
    "float_power",
    "less",
    "greater",
    "less_equal",
    "greater_equal",
    "not_equal",
    "multiply",
    "divide",
    "subtract",
    "min_other",
    "max_other",
]


def elementwise_signature(call: Call) -> Signature:
    """Align every operand, at the right, with the output: `d0 d1 d2`."""
    builder = SignatureBuilder()
    shape = call.outputs[0].shape
    outs = [broadcast_dims(spec.shape, shape, builder) for spec in call.outputs]
    return builder.build([broadcast_dims(spec.shape, shape, builder) for spec in call.inputs], outs)


rule(*UNARY, kind="elementwise")(elementwise_signature)


@rule("prelu", kind="elementwise")
def prelu(call: Call) -> Signature:
    """`n c *, c -> n c *`: the slope belongs to dim 1."""
    builder = SignatureBuilder()
    shape = call.inputs[0].shape
    dims = broadcast_dims(shape, shape, builder)
    slope = (dims[1] if len(shape) > 1 and call.inputs[1].shape[0] > 1 else (),)
    return builder.build([dims, slope], [dims])


@rule("glu", kind="elementwise")
def glu(call: Call) -> Signature:
    """The halves of one dim gate each other, so that dim stays whole."""
    builder = SignatureBuilder()
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    dim = call.arg(1, "dim", -1) % len(shape)
    ins = tuple(builder.loop(f"x{k}" if k == dim else f"d{k}", n, whole=k == dim) for k, n in enumerate(shape))
    outs = tuple(builder.loop(f"y{k}" if k == dim else f"d{k}", n, whole=k == dim) for k, n in enumerate(out))
    return builder.build([ins], [outs])
