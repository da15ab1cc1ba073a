"""Estimates the workspaces of CUDA kernels, freed after the call or kept; from source and documentation, not measured.

    attention, backward (flash)       dq in fp32 [b, h, s, d], rows of Δ [b, h, s]; with shared heads dk and dv of all
    attention, backward (efficient)   Δ [b, h, s]; for 16-bit values dq in fp32
    convolution (cuDNN), 16 bit       channels-last copies, which its tensor cores read, of tensors in another layout
    products (cuBLAS), operands       a copy of each matrix that has no dim of stride 1, such as an expanded scalar
    products (cuBLAS)                 a workspace for each calling thread, kept from its first product on

An attention's sequences are rounded up to 128, its head dims to 32 (64 above 128).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Arguments = tuple[Any, ...]
_HALVES = (torch.float16, torch.bfloat16)
NUM_BLAS_THREADS = 2
"""The threads that call cuBLAS: the caller's, for forward and update, and autograd's, for the backward."""


def gpu_workspace_bytes(func: Any, args: Arguments, out: Any) -> int:
    """Return the workspace bytes of the CUDA kernel of `func`, beyond its outputs; only shapes are read.

    >>> q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="meta")
    >>> func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    >>> gpu_workspace_bytes(func, (q, q, q, q, q), (q, q, q)) == 4 * 2 * 4 * 128 * (64 + 1)
    True
    """
    estimate = _WORKSPACES.get(func)
    return 0 if estimate is None else estimate(args, out)


def _flash_backward(args: Arguments, out: Any) -> int:
    query, key = args[1], args[2]
    batch, heads, length, head_dim = query.shape
    rows = batch * heads * _rounded(length, 128)
    num_bytes = 4 * rows * (_rounded(head_dim, 32 if head_dim <= 128 else 64) + 1)
    if key.shape[1] != heads:
        num_bytes += 2 * batch * heads * key.shape[2] * head_dim * key.element_size()
    return num_bytes


def _efficient_backward(args: Arguments, out: Any) -> int:
    query = args[1]
    rows = 4 * math.prod(query.shape[:-1])
    return rows + (4 * query.numel() if query.dtype in _HALVES else 0)


def _convolution(args: Arguments, out: Tensor) -> int:
    return _channels_last_copies([args[0], args[1], out])


def _convolution_backward(args: Arguments, out: Sequence[Tensor | None]) -> int:
    return _channels_last_copies([args[0], args[1], args[2], *out[:2]])


def _product(args: Arguments, out: Any) -> int:
    return operand_copies(args[-2:])


def _biased_product(args: Arguments, out: Any) -> int:
    return operand_copies(args[1:3])


def operand_copies(operands: Sequence[Tensor]) -> int:
    """Return the bytes of the contiguous copies that a product makes first of those operands that cuBLAS cannot read.

    cuBLAS reads a matrix whose rows or columns are contiguous and do not overlap, at any distance from each other.

    >>> grad = torch.ones((), dtype=torch.half).expand(8, 6)  # as the backward of a sum makes it
    >>> operand_copies([grad, torch.ones(6, 4)[:, :2]])
    96
    """
    return sum(_num_bytes(operand) for operand in operands if not _is_readable(operand))


def _is_readable(matrix: Tensor) -> bool:
    if matrix.dim() < 2 or 0 in matrix.shape:
        return True
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _channels_last_copies(tensors: Sequence[Tensor | None]) -> int:
    return sum(_num_bytes(tensor) for tensor in tensors if tensor is not None and _is_copied(tensor))


def _is_copied(tensor: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if layout is None or tensor.dtype not in _HALVES:
        return False
    return not tensor.is_contiguous(memory_format=layout)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rounded(size: int, granule: int) -> int:
    return -(-size // granule) * granule


_WORKSPACES: dict[Any, Callable[[Arguments, Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _biased_product,
    aten.baddbmm.default: _biased_product,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
