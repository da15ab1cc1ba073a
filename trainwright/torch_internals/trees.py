"""Tensors in nested tuples, lists and dicts."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments, left to right."""
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
