"""What a CPU kernel takes inside one call and gives back before it returns, which no dispatch mode can see.

Found by measuring single calls with the allocator's own records (`benchmarks/profiler`), and modelled:

    convolution (oneDNN)  copies of input, weight and output in its blocked layout, the output's being copied back
    convolution (native)  the input unfolded into columns
    LSTM layer (oneDNN)   copies of the weights, the gates of all steps; in the backward the incoming gradients too

oneDNN picks its layouts at run time from a heuristic of its own; what stands here is what it picks in most cases.
The fake kernel of one op understates an output: what an LSTM layer keeps for its backward (`output_bytes`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Arguments = tuple[Any, ...]
_BARRIERS_BYTES = 8448
"""What oneDNN's threads take to wait for one another."""


def workspace_bytes(func: Any, args: Arguments, kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that the CPU kernel of `func` takes beside its outputs, at its own peak; only shapes are read.

    >>> x, w = torch.empty(8, 32, 32, 32), torch.empty(64, 32, 3, 3)
    >>> call = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    >>> out = torch.empty(8, 64, 32, 32)
    >>> workspace_bytes(torch.ops.aten.convolution.default, call, {}, out) >= 4 * out.numel()  # a copy of the output
    True
    """
    estimate = _WORKSPACES.get(func)
    return 0 if estimate is None else max(0, estimate(args, out))


def _convolution(args: Arguments, out: Tensor) -> int:
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    if not _takes_onednn(x, weight, stride, dilation, transposed, output_padding, groups):
        return _columns(x, weight, out, stride, padding, groups)
    if _is_channels_last(x, weight):
        return 2 * _num_bytes(weight)
    during = _blocked_input(x) + _num_bytes(weight) + _blocked(out)
    return max(during, _blocked(out) + _num_bytes(out)) - _num_bytes(out)


def _convolution_backward(args: Arguments, out: Sequence[Tensor | None]) -> int:
    grad_out, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args[:11]
    if not _takes_onednn(x, weight, stride, dilation, transposed, output_padding, groups):
        return _columns(x, weight, grad_out, stride, padding, groups) if mask[1] else 0
    if _is_channels_last(x, weight):
        return 3 * _num_bytes(weight) + _grouped_blocks(weight, groups)
    peak, end = 0, 0
    if mask[0]:
        num_copies = 2 if _is_strided(stride) and not transposed else 1
        during = _blocked(grad_out) + _num_bytes(weight) + _blocked(x)
        peak, end = max(during, _blocked(x) + num_copies * _num_bytes(x)), _num_bytes(x)
    if mask[1] or mask[2]:
        num_copies = _parts_of_batch(x, grad_out, weight, math.prod(stride), groups)
        copies = num_copies * _num_bytes(weight) + (num_copies > 1) * _BARRIERS_BYTES
        peak = max(peak, end + _blocked(grad_out) + _blocked_input(x) + copies)
    end = sum(_num_bytes(tensor) for tensor in out if tensor is not None)
    return max(peak, end + _num_bytes(weight) if mask[1] else 0) - end


def output_bytes(func: Any, args: Arguments, out: Any) -> dict[int, int]:
    """Return the true sizes, by position, of outputs that the fake kernel of `func` makes too small."""
    if func is not aten.mkldnn_rnn_layer.default or type(out[3]) is Tensor:
        return {}
    return {3: _lstm_kept_bytes(args[0], args[2].shape[1])}


def _lstm_kept_bytes(x: Tensor, hidden: int) -> int:
    """oneDNN's training workspace for x [s, b, i]: gates, states of layer and time and their gradients, in pages."""
    num_steps, batch, inputs = x.shape
    size = x.element_size()
    gates = num_steps * batch * _leading(4 * hidden, size) * size
    wide = 2 * (num_steps + 1) * batch * _leading(max(inputs, hidden), size) * size
    narrow = 2 * (num_steps + 1) * batch * _leading(hidden, size) * size
    return _pages(gates) + 3 * _pages(wide) + 2 * _pages(narrow) + _pages(num_steps * batch * hidden * size)


def _leading(columns: int, size: int) -> int:
    """oneDNN's row length: whole cache lines, and no multiple of 256 elements, where rows would share cache sets."""
    line = 64 // size
    padded = -(-columns // line) * line
    return padded + line if padded % 256 == 0 else padded


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def _lstm(args: Arguments, out: Any) -> int:
    x, *weights = args[:5]
    return sum(_num_bytes(weight) for weight in weights[:3]) + _lstm_gates(x, weights[1])


def _lstm_backward(args: Arguments, out: Any) -> int:
    x, *weights = args[:5]
    states = 2 * x.shape[1] * weights[1].shape[1] * x.element_size()
    return _lstm(args, out) + x.shape[0] * states // 2 + states


def _lstm_gates(x: Tensor, weight: Tensor) -> int:
    """The gates of all steps, and a few states; weight [4 hidden, hidden]."""
    return (x.shape[0] + 1) * x.shape[1] * weight.shape[0] * x.element_size()


def _takes_onednn(x, weight, stride, dilation, transposed, output_padding, groups) -> bool:
    """Mirror `ConvParams::use_mkldnn` of ATen/native/Convolution.cpp."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if transposed and any(extra >= step for extra, step in zip(output_padding, stride)):
        return False
    if x.dtype in (torch.bfloat16, torch.float16):
        return _block_elements() == 16
    kernel = weight.shape[2:]
    worth_it = (
        _is_strided(stride)
        or any(step != 1 for step in dilation)
        or x.shape[0] >= 16
        or any(size != 1 for size in kernel)
    )
    large = groups > 1 or min(kernel, default=1) > 3 or x.shape[0] > 1 or x.numel() > 20480
    return x.dtype is torch.float32 and large and (worth_it or torch.get_num_threads() > 1)


def _is_strided(stride: Sequence[int]) -> bool:
    return any(step != 1 for step in stride)


def _parts_of_batch(x: Tensor, grad_out: Tensor, weight: Tensor, stride: int, groups: int) -> int:
    """How many partial gradients of a weight oneDNN sums: its threads share the batch, or else the channels.

    It takes the split in which a thread reads and writes least, weights counting eight times (`balance` in
    jit_avx512_common_conv_kernel.cpp), and the last one of equals.
    """
    num_threads, block = torch.get_num_threads(), _block_elements()
    if num_threads == 1 or groups > 1:
        return 1
    batch, inputs, outputs = x.shape[0], -(-x.shape[1] // block), -(-grad_out.shape[1] // block)
    in_block, out_block = min(block, x.shape[1]), min(block, grad_out.shape[1])
    best = (math.inf, 1)
    for parts in range(1, min(num_threads, batch * grad_out.shape[-1]) + 1):
        for by_output in range(1, min(num_threads // parts, outputs) + 1):
            by_input = min(num_threads // parts // by_output, inputs)
            ins, outs = -(-inputs // by_input) * in_block, -(-outputs // by_output) * out_block
            rows = -(-batch // parts)
            cost = rows * ins * math.prod(x.shape[2:]) // stride + rows * outs * math.prod(grad_out.shape[2:])
            cost += 8 * ins * outs * math.prod(weight.shape[2:])
            if cost <= best[0]:
                best = (cost, parts)
    return best[1]


def _grouped_blocks(weight: Tensor, groups: int) -> int:
    """The gradient of a grouped weight in channels-last: each group's channels in whole blocks, in and out."""
    if groups == 1:
        return 0
    block = _block_elements()
    out_per_group = -(-weight.shape[0] // groups // block) * block
    in_per_group = -(-weight.shape[1] // block) * block
    return groups * out_per_group * in_per_group * math.prod(weight.shape[2:]) * weight.element_size()


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel keeps the layout that the tensors have, and so copies neither input nor output."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if layout is None:
        return False
    return any(tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous() for tensor in (x, weight))


def _columns(x: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int) -> int:
    """[n, c_in · kernel, positions of the output]; none for a 1 × 1 kernel that visits every position.

    Groups run one after the other, and their outputs are joined at the end.
    """
    kernel = weight.shape[2:]
    parts = _num_bytes(out) if groups > 1 else 0
    if all(size == 1 for size in kernel) and not _is_strided(stride) and not any(padding):
        return parts
    per_group = x.shape[0] * x.shape[1] // groups * math.prod(kernel) * math.prod(out.shape[2:]) * x.element_size()
    return max(per_group, parts)


def _blocked_input(x: Tensor) -> int:
    """An image of few channels is read as it is."""
    return 0 if x.shape[1] <= 5 else _blocked(x)


def _blocked(tensor: Tensor) -> int:
    """The bytes in oneDNN's layout: channels in whole blocks."""
    block = _block_elements()
    channels = -(-tensor.shape[1] // block) * block
    return tensor.shape[0] * channels * math.prod(tensor.shape[2:]) * tensor.element_size()


@functools.cache
def _block_elements() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_WORKSPACES: dict[Any, Callable[[Arguments, Any], int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.mkldnn_rnn_layer.default: _lstm,
    aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
}
