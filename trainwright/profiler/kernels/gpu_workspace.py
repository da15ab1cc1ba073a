"""Estimates the workspaces of CUDA kernels, freed after the call or kept; measured on an H200 with torch 2.11.

    attention, backward (flash)       dq in fp32 [b, h, s, d], rows of Δ [b, h, s]; with shared heads dk and dv of all
    attention, backward (cuDNN)       the same, with no sequence or head dim rounded
    attention, backward (efficient)   Δ, and dq in fp32 by blocks; of fp32, before it, the product that Δ sums, and Δ twice
    sums and means                    partial sums of a result that several blocks of threads make together: `reduction_bytes`
    softmax, backward                 the product of its gradient and its result
    embedding, backward               of more than 3,072 indices: partial sums in fp32, and the sorted indices
    convolution (cuDNN), to 32 bit    channels-last copies, which its tensor cores read, of what lies in another layout or has
                                      channels that fill no whole words of 16 bytes; a 1x1 convolution's forward makes none
    products (cuBLAS), operands       a copy of each matrix that has no dim of stride 1, such as an expanded scalar
    products (cuBLAS)                 a workspace for each calling thread, kept from its first product on

Flash rounds an attention's sequences up to 128, its head dims to 32 (64 above 128). What cuDNN takes beyond the copies depends on
the algorithm that it picks, and is not counted: 2 to 19 MB in a weight's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .workspace_native import num_bytes, operand_copies

aten = torch.ops.aten
Arguments = tuple[Any, ...]
_TO_32_BITS = (torch.float16, torch.bfloat16, torch.float32)
_HALVES = _TO_32_BITS[:2]
NUM_BLAS_THREADS = 2
"""The threads that call cuBLAS: the caller's, for forward and update, and autograd's, for the backward."""
_NUM_UNITS, _UNIT_THREADS = 132, 2048
"""The multiprocessors of an H100 or H200, and the threads that each runs; a sum takes no more on a device with fewer."""
_BLOCK_THREADS = 512
"""The most threads of a block of torch's reductions; a thread that reads several outputs at once counts as so many."""
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""The values that each thread of a reduction has at least where threads share an output, and those above which blocks do."""
_SORTED_FROM, _SEGMENT, _INDEX_BYTES = 3072, 10, 48
"""Of an embedding's gradient: indices above which they are sorted, rows of a partial sum, and what sorting an index takes."""


def gpu_workspace_bytes(func: Any, args: Arguments, out: Any) -> int:
    """Return the workspace bytes of the CUDA kernel of `func`, beyond its outputs; only shapes are read.

    >>> q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="meta")
    >>> func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    >>> gpu_workspace_bytes(func, (q, q, q, q, q), (q, q, q)) == 4 * 2 * 4 * 128 * (64 + 1)
    True
    """
    estimate = _WORKSPACES.get(func)
    return 0 if estimate is None else estimate(args, out)


def is_uneven(func: Any, args: Arguments, out: Any) -> bool:
    """Tell whether a share of the call of `func` may take another share of its workspace."""
    return func in _UNEVEN and gpu_workspace_bytes(func, args, out) > 0


def reduction_bytes(num_outputs: int, num_inputs: int, across: bool, value_bytes: int = 4) -> int:
    """Return the bytes of partial results that torch's reduction of `num_inputs` values to each of `num_outputs` takes.

    Where outputs alone do not fill the device, several blocks of threads share one; each thread of a block that runs across the
    outputs then leaves its partial result in global memory, in more room than it needs.

    across: whether the outputs, not the values of one, lie side by side in memory: as in the gradient of a bias. value_bytes:
    the bytes of a partial result; 16-bit values are summed in fp32.

    >>> reduction_bytes(3072, 8192, across=True)  # the bias of a layer of GPT-2, 8,192 tokens: 132 MiB
    138412544
    >>> reduction_bytes(3072, 512, across=True)
    0
    """
    vector = math.gcd(4, num_outputs) if across else 1
    width, height = (num_outputs // vector, num_inputs) if across else (num_inputs, num_outputs)
    most = _BLOCK_THREADS // vector
    most_wide, most_high = min(_power_of_two(width), most), min(_power_of_two(height), most)
    high = min(most_high, most // min(most_wide, 32))
    wide = min(most_wide, most // high)
    steps = 1 if across else wide
    values = -(-num_inputs // steps)
    if values < min(_LEAST_VALUES * high, _MOST_VALUES):
        return 0  # each row of threads has outputs of its own
    values = -(-num_inputs // (steps * high))
    columns = -(-(num_outputs // vector) // (wide if across else 1))
    filled = _NUM_UNITS * (_UNIT_THREADS // (wide * high))
    if values < _MOST_VALUES or columns > filled:
        return 0
    blocks = max(min(-(-filled // columns), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if blocks == 1:
        return 0
    partial = value_bytes * num_outputs * blocks * (wide * vector if across else 1)
    return _rounded(partial, 512) + _rounded(4 * columns, 512)


def _flash_backward(args: Arguments, out: Any) -> int:
    query, key = args[1], args[2]
    batch, heads, length, head_dim = query.shape
    rows = batch * heads * _rounded(length, 128)
    total = 4 * rows * (_rounded(head_dim, 32 if head_dim <= 128 else 64) + 1)
    if key.shape[1] != heads:
        total += 2 * batch * heads * key.shape[2] * head_dim * key.element_size()
    return total


def _cudnn_backward(args: Arguments, out: Any) -> int:
    query = args[1]
    return 4 * math.prod(query.shape[:-1]) * (query.shape[-1] + 1)


def _efficient_backward(args: Arguments, out: Any) -> int:
    grad, query = args[0], args[1]
    *batch, length, head_dim = query.shape
    rows = 4 * math.prod(query.shape[:-1])
    block = 64 if head_dim <= 64 else 128
    by_blocks = 4 * math.prod(batch) * _rounded(length, block) * _rounded(head_dim, block)
    total = rows + by_blocks
    if query.dtype not in _HALVES:
        total = max(total, 4 * query.numel() + 2 * rows)
    # it is read with heads beside each other, as the layer before the attention's result has it
    return total + (0 if grad.transpose(1, 2).is_contiguous() else num_bytes(grad))


def _reduction(args: Arguments, out: Any) -> int:
    values, dims = args[0], args[1] if len(args) > 1 else None
    if not isinstance(out, Tensor) or not values.numel() or not out.numel():
        return 0
    reduced = {dim % max(1, values.dim()) for dim in dims} if dims else set(range(values.dim()))
    strides = [(stride, dim) for dim, (stride, size) in enumerate(zip(values.stride(), values.shape)) if size > 1]
    across = bool(strides) and min(strides)[1] not in reduced
    value_bytes = max(4, values.element_size())
    return reduction_bytes(out.numel(), values.numel() // out.numel(), across, value_bytes)


def _softmax_backward(args: Arguments, out: Tensor) -> int:
    return num_bytes(args[0])


def _embedding_backward(args: Arguments, out: Tensor) -> int:
    num_indices, num_rows = args[1].numel(), args[2]
    if num_indices <= _SORTED_FROM:
        return 0
    num_sums = -(-num_indices // _SEGMENT) + min(num_indices, num_rows)
    return 4 * out.shape[-1] * num_sums + _INDEX_BYTES * num_indices


def _convolution(args: Arguments, out: Tensor) -> int:
    return 0 if _is_product(args, args[1]) else _channels_last_copies([args[0], args[1], out])


def _convolution_backward(args: Arguments, out: Sequence[Tensor | None]) -> int:
    grad, values, weight = args[:3]
    return _channels_last_copies([grad, values, weight])  # the gradient of the values, then that of the weight


def _is_product(args: Arguments, weight: Tensor) -> bool:
    """Tell whether a convolution is a product of matrices, for which no layout has to change."""
    strides, padding = args[3], args[4]
    return math.prod(weight.shape[2:]) == 1 and set(strides) <= {1} and set(padding) <= {0}


def _product(args: Arguments, out: Any) -> int:
    return operand_copies(args[-2:])


def _biased_product(args: Arguments, out: Any) -> int:
    return operand_copies(args[1:3])


def _channels_last_copies(tensors: Sequence[Tensor | None]) -> int:
    return sum(_copied_bytes(tensor) for tensor in tensors if tensor is not None and _is_copied(tensor))


def _is_copied(tensor: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if layout is None or tensor.dtype not in _TO_32_BITS:
        return False
    return not tensor.is_contiguous(memory_format=layout) or _rounded_channels(tensor) > tensor.shape[1]


def _copied_bytes(tensor: Tensor) -> int:
    return num_bytes(tensor) // max(1, tensor.shape[1]) * _rounded_channels(tensor)


def _rounded_channels(tensor: Tensor) -> int:
    """Return the channels of a copy, which fill whole words of 16 bytes."""
    return _rounded(tensor.shape[1], 16 // tensor.element_size())


def _power_of_two(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (max(1, size).bit_length() - 1)


def _rounded(size: int, granule: int) -> int:
    return -(-size // granule) * granule


_REDUCTIONS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_UNEVEN = (*_REDUCTIONS, aten.convolution.default, aten.convolution_backward.default)
_WORKSPACES: dict[Any, Callable[[Arguments, Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    **dict.fromkeys(_REDUCTIONS, _reduction),
    aten._softmax_backward_data.default: _softmax_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _biased_product,
    aten.baddbmm.default: _biased_product,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
