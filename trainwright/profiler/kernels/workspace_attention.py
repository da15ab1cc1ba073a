"""Estimates the workspace of the CPU's flash attention: for each thread a tile of scores, and its row statistics.

ATen's kernel cuts queries into tiles of 32, 64 or 256 rows and keys into tiles of 512. In bf16 its products run in
oneDNN, which allocates more by its own rules: the formula, for calls too large to be measured (`probe`), omits that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .workspace_native import num_bytes

_FP32_BYTES = 4
_KEY_TILE = 512


def attention_bytes(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of scores, row maxima and sums, and rows of the result; args: query [b, h, q, d], key, value, …"""
    query, key = args[:2]
    rows, columns = _tile(query, key)
    per_thread = (rows * columns + 2 * rows + rows * query.shape[3]) * _FP32_BYTES
    return torch.get_num_threads() * (per_thread + _reduced_scores(query, rows, columns))


def attention_backward_bytes(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of scores, their gradient, one sum a row, and a copy of a gradient whose memory is not [b, q, h, d].

    args: gradient [b, h, q, d], query, key, …
    """
    grad, query, key = args[:3]
    rows, columns = _tile(query, key)
    per_thread = 2 * rows * columns * _FP32_BYTES + 2 * _reduced_scores(query, rows, columns)
    copy_bytes = 0 if _lies_by_position(grad) else num_bytes(grad)
    return copy_bytes + rows * _FP32_BYTES + torch.get_num_threads() * per_thread


def _lies_by_position(grad: Tensor) -> bool:
    """Tell whether [b, h, q, d] is a view of a contiguous [b, q, h, d]; dims of size 1 may have any stride."""
    step = 1
    for dim in (3, 1, 2, 0):
        if grad.shape[dim] > 1 and grad.stride(dim) != step:
            return False
        step *= grad.shape[dim]
    return True


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(_KEY_TILE, key.shape[2])


def _reduced_scores(query: Tensor, rows: int, columns: int) -> int:
    return rows * columns * query.element_size() if query.element_size() < _FP32_BYTES else 0
