"""Matrix products. The contracted loop is reduced: splitting it leaves partial sums."""

from __future__ import annotations

from typing import Any

from . import partial
from .local import LocalContext, replace_arg
from .registry import rule
from .signature import Call, Signature, SignatureBuilder, einsum_signature


def add_bias_once(index: int, name: str, loop: str):
    """Make the local rule of an op whose bias would be added by every rank of a split contraction."""

    def localize(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        bias = args[index] if index < len(args) else kwargs.get(name)
        if bias is None or not ctx.split(loop):
            return target, args, kwargs

        def retargeted(target: Any) -> Any:
            """Return the local form of `target`, which may be another way to compute the op."""

            def with_one_bias(*tensors: Any, **options: Any) -> Any:
                held = tensors[index] if index < len(tensors) else options[name]
                tensors, options = replace_arg(tensors, options, index, name, partial.once(held, ctx.owner(loop)))
                return target(*tensors, **options)

            return with_one_bias

        found = retargeted(target)
        found.retargeted = retargeted
        return found, args, kwargs

    return localize


@rule("linear", localize=add_bias_once(2, "bias", "i"))
def linear(call: Call) -> Signature:
    """`b* i, o i, o -> b* o`."""
    pattern = "b* i, o i, o -> b* o" if len(call.inputs) == 3 else "b* i, o i -> b* o"
    return einsum_signature(pattern, call, reduced="i", once=(2,))


@rule("linear_io", localize=add_bias_once(2, "bias", "i"))
def linear_io(call: Call) -> Signature:
    """`b* i, i o, o -> b* o`: a linear layer whose weight is stored transposed."""
    pattern = "b* i, i o, o -> b* o" if len(call.inputs) == 3 else "b* i, i o -> b* o"
    return einsum_signature(pattern, call, reduced="i", once=(2,))


@rule("mm", "matmul", "dot", "mv", "vdot", "inner")
def matmul(call: Call) -> Signature | None:
    """`b* m i, b* i n -> b* m n`, with NumPy's rules for vectors and leading dims."""
    left, right = (len(spec.shape) for spec in call.inputs)
    if left == 0 or right == 0 or call.name == "inner":
        return None
    lead = max(left, right) - 2
    row = [f"b{k}" for k in range(max(0, lead))]
    first = ([*row[len(row) - (left - 2) :], "m", "i"] if left > 1 else ["i"]) if left != 2 else ["m", "i"]
    second = ([*row[len(row) - (right - 2) :], "i", "n"] if right > 1 else ["i"]) if right != 2 else ["i", "n"]
    out = row + (["m"] if left > 1 else []) + (["n"] if right > 1 else [])
    pattern = f"{' '.join(first)}, {' '.join(second)} -> {' '.join(out)}"
    return einsum_signature(pattern, call, reduced="i")


@rule("bmm")
def bmm(call: Call) -> Signature:
    """`b m i, b i n -> b m n`."""
    return einsum_signature("b m i, b i n -> b m n", call, reduced="i")


@rule("addmm", localize=add_bias_once(0, "self", "i"))
def addmm(call: Call) -> Signature | None:
    """`[m] n, m i, i n -> m n`."""
    bias = "m n" if len(call.inputs[0].shape) == 2 else "n"
    return einsum_signature(f"{bias}, m i, i n -> m n", call, reduced="i", once=(0,))


@rule("baddbmm", localize=add_bias_once(0, "self", "i"))
def baddbmm(call: Call) -> Signature | None:
    """`b m n, b m i, b i n -> b m n`."""
    if len(call.inputs[0].shape) != 3:
        return None
    return einsum_signature("b m n, b m i, b i n -> b m n", call, reduced="i", once=(0,))


@rule("bilinear")
def bilinear(call: Call) -> Signature:
    """`b* i, b* j, o i j, o -> b* o`: the batch and the output only."""
    pattern = "b* i, b* j, o i j, o -> b* o" if len(call.inputs) == 4 else "b* i, b* j, o i j -> b* o"
    return einsum_signature(pattern, call, whole="i j")


@rule("einsum")
def einsum(call: Call) -> Signature | None:
    """The equation itself is the signature."""
    equation = str(call.arg(0, "equation")).replace(" ", "")
    if "..." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    operands = left.split(",")
    if any(len(set(term)) != len(term) for term in operands):
        return None
    builder = SignatureBuilder()
    sizes = {name: n for term, spec in zip(operands, call.inputs) for name, n in zip(term, spec.shape) if n != 1}
    named = lambda term, shape: tuple(builder.loop(f"e{c}", n) for c, n in zip(term, shape))  # noqa: E731
    ins = [named(term, spec.shape) for term, spec in zip(operands, call.inputs)]
    reduced = [f"e{name}" for name in sizes if name not in right]
    return builder.build(ins, [named(right, call.outputs[0].shape)], reduced)


@rule("outer", "ger")
def outer(call: Call) -> Signature:
    """`m, n -> m n`."""
    return einsum_signature("m, n -> m n", call)
