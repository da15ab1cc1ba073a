"""Passes that restore linear maps on n-dimensional operands, where batch and sequence stay apart."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...ops.functional import linear_io
from .common import Context, aten, bound, calls, emit, is_call, operand, replace, shape


def fuse_linears(graph: fx.Graph, context: Context) -> None:
    """Turn `reshape → addmm | mm | linear → reshape` into one linear map on the shape before the first reshape."""
    for node in calls(graph, "addmm", "mm", "linear", "matmul"):
        parts = _linear_parts(node)
        if parts is None:
            continue
        rows, weight, bias, input_first = parts
        source, last = _unflattened(node, rows)
        if last is node and is_call(node, "linear"):
            continue
        args = (source, weight) if bias is None else (source, weight, bias)
        fused = emit(context, node, linear_io if input_first else aten.linear.default, args, like=node)
        if last is node or shape(fused) == shape(last):
            replace(last, fused)
        else:
            last.args = (fused, *last.args[1:])


def _linear_parts(node: fx.Node) -> tuple[fx.Node, fx.Node, Any, bool] | None:
    """Return (rows, weight, bias, weight stored input-first) when the call is a linear map by a 2-D weight."""
    named = bound(node)
    if is_call(node, "linear"):
        return named["input"], named["weight"], named["bias"], False
    if is_call(node, "addmm"):
        bias, rows, weight = named["self"], named["mat1"], named["mat2"]
        if named["beta"] != 1 or named["alpha"] != 1 or len(shape(bias)) != 1:
            return None
    else:
        rows, weight = operand(node), operand(node, 1)
        bias = None
    if not _is_weight(weight) or len(shape(rows)) < 2:
        return None
    transposed = _transposed(weight)
    return (rows, weight, bias, True) if transposed is None else (rows, transposed, bias, False)


def _is_weight(node: fx.Node) -> bool:
    """A 2-D tensor that is a parameter, but for conversions and transposition."""
    while is_call(node, "to", *TRANSPOSITIONS):
        node = operand(node)
    return node.op == "placeholder" and node.meta["role"] == "param" and len(shape(node)) == 2


TRANSPOSITIONS = ("t", "numpy_T", "mT", "transpose", "permute")


def _transposed(weight: fx.Node) -> fx.Node | None:
    """Return what the 2-D `weight` is the transpose of, or None."""
    if not is_call(weight, *TRANSPOSITIONS):
        return None
    if is_call(weight, "transpose"):
        swaps = bound(weight)["dim0"] % 2 != bound(weight)["dim1"] % 2
    else:
        swaps = not is_call(weight, "permute") or bound(weight)["dims"][0] % 2 == 1
    return operand(weight) if swaps else None


def _unflattened(node: fx.Node, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the operand before it was flattened, and the last node of the pattern (`node` when there is none)."""
    if not is_call(rows, "reshape") or len(node.users) != 1:
        return rows, node
    source = operand(rows)
    after = next(iter(node.users))
    whole_rows = shape(source)[-1:] == shape(rows)[-1:]
    if is_call(after, "reshape") and whole_rows and _begins(shape(after), shape(source)[:-1]):
        return source, after
    return rows, node


def _begins(longer: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    return longer[: len(beginning)] == beginning and len(longer) > len(beginning)
