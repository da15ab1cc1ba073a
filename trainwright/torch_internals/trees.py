"""Tensors in nested tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments, left to right."""
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
