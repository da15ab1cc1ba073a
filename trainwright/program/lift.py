"""Rewrites a program to another precision, the model's own casts and literal dtypes included."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_internals.dtypes import in_precision
from .program import Program


def lift_dtypes(program: Program, dtype: torch.dtype = torch.float64) -> None:
    """Rewrite every floating-point dtype in the program's calls to `dtype`, in place; constants are converted too.

    The ops and their order stay the same: what was a cast from bf16 to fp32 becomes a cast that changes nothing. What makes floats
    out of none (`torch.zeros(3)`, half of an integer) makes those of torch's default dtype, which is to be `dtype` where it runs.
    """
    for node in program.captured.graph.nodes:
        if node.op == "call_function":
            node.args = _lift(node.args, dtype)
            node.kwargs = _lift(node.kwargs, dtype)
    program.lifted = dtype
    for tensor in program.tensors:
        if tensor.role == "const" and tensor.value is not None:
            tensor.value = tensor.value.to(in_precision(tensor.value.dtype, dtype))


def _lift(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, torch.dtype):
        return in_precision(tree, dtype)
    if isinstance(tree, dict):
        return {key: _lift(value, dtype) for key, value in tree.items()}
    return type(tree)(_lift(value, dtype) for value in tree) if type(tree) in (list, tuple) else tree
