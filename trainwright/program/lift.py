"""Rewrites a program to another precision, the model's own casts and literal dtypes included."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..torch_internals import private
from .program import Program


def lift_dtypes(program: Program, dtype: torch.dtype = torch.float64) -> None:
    """Rewrite every floating-point dtype in the program's calls to `dtype`, in place; constants are converted too.

    The ops and their order stay the same: what was a cast from bf16 to fp32 becomes a cast that changes nothing.
    """
    for node in program.captured.graph.nodes:
        if node.op == "call_function":
            node.args = _lift(node.args, dtype)
            node.kwargs = _lift(node.kwargs, dtype)
            if _makes_default_floats(node):
                node.kwargs = {**node.kwargs, "dtype": dtype}
    program.lifted = dtype
    for tensor in program.tensors:
        if tensor.role == "const" and tensor.value is not None and tensor.value.is_floating_point():
            tensor.value = tensor.value.to(dtype)


def _makes_default_floats(node: fx.Node) -> bool:
    """Return True if the call creates a tensor of torch's default dtype, as `torch.zeros(3)` does."""
    if not isinstance(node.target, private.OpOverload) or "dtype" in node.kwargs or node.all_input_nodes:
        return False
    takes = any(name == "dtype" and keyword_only for name, _, keyword_only in private.arguments(node.target))
    made = node.meta.get("val")
    return takes and isinstance(made, torch.Tensor) and made.is_floating_point()


def _lift(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, torch.dtype):
        return dtype if tree.is_floating_point else tree
    if isinstance(tree, dict):
        return {key: _lift(value, dtype) for key, value in tree.items()}
    return type(tree)(_lift(value, dtype) for value in tree) if type(tree) in (list, tuple) else tree
