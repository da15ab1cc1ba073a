"""Estimates the workspaces of oneDNN's and ATen's own convolutions on a CPU.

    oneDNN  copies of input, weight and output in its blocked layout, the output's being copied back
    native  the input unfolded into columns

oneDNN picks its layouts at run time by its own heuristic. The formulas hold for what it picks in most cases; they serve calls
that are too large to be measured (`probe`), and are checked against calls on a few images (`checked`). They were found by
measuring single calls with the allocator's own records.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .probe import is_small, probe
from .workspace_native import Estimate, num_bytes

aten = torch.ops.aten
Arguments = tuple[Any, ...]
_LARGEST_DIRECT_KERNEL = 14
"""The longest side, in elements, of a kernel that oneDNN convolves directly."""
_BARRIERS_BYTES = 8448
"""The bytes of the barriers at which oneDNN's threads synchronise."""


_TOLERANCE_BYTES = 512


def checked(func: Any, estimate: Estimate, args: Arguments, out: Any) -> int:
    """Return the workspace of a call that is too large to run: the estimate, if it is right for a call on fewer images.

    Else the workspace is extrapolated linearly from measured calls on fewer images: as many as are quick to run, and at
    least two, since a single image takes another code path.
    """
    whole = estimate(args, out)
    num_images = (args[1] if func is aten.convolution_backward.default else args[0]).shape[0]
    some = min(4 * torch.get_num_threads(), num_images // 2)
    while 2 * some < num_images and is_small(func, *_with_images(func, args, out, 2 * some), part=0.125):
        some *= 2
    found = _taken(func, args, out, some) if some >= 2 else None
    if found is None or abs(estimate(*_with_images(func, args, out, some)) - found) <= _TOLERANCE_BYTES:
        return whole
    half = _taken(func, args, out, some // 2) if some > 2 else None
    return whole if half is None else found + (found - half) * (num_images - some) // (some // 2)


def _taken(func: Any, args: Arguments, out: Any, num_images: int) -> int | None:
    some_args, some_out = _with_images(func, args, out, num_images)
    found = probe(func, some_args, {}, some_out)
    return None if found is None else found.workspace_bytes


def _with_images(func: Any, args: Arguments, out: Any, num_images: int) -> tuple[Arguments, Any]:
    """Return the arguments and the result of the call with `num_images` images, as meta tensors."""
    if func is aten.convolution.default:
        return (_resized(args[0], num_images), *args[1:]), _resized(out, num_images)
    grad_input = None if out[0] is None else _resized(out[0], num_images)
    images = (_resized(args[0], num_images), _resized(args[1], num_images))
    return (*images, *args[2:]), (grad_input, *out[1:])


def _resized(tensor: Tensor, num_images: int) -> Tensor:
    return torch.empty_strided((num_images, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device="meta")


def convolution_bytes(args: Arguments, out: Tensor) -> int:
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    if not _takes_onednn(x, weight, stride, dilation, transposed, output_padding, groups):
        return _columns(x, weight, out, stride, padding, groups)
    if _is_channels_last(x, weight):
        return 2 * num_bytes(weight)
    during = _blocked_input(x) + num_bytes(weight) + _blocked(out)
    return max(during, _blocked(out) + num_bytes(out)) - num_bytes(out)


def convolution_backward_bytes(args: Arguments, out: Sequence[Tensor | None]) -> int:
    grad_out, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args[:11]
    if not _takes_onednn(x, weight, stride, dilation, transposed, output_padding, groups):
        return _columns(x, weight, grad_out, stride, padding, groups) if mask[1] else 0
    if _is_channels_last(x, weight):
        return 3 * num_bytes(weight) + _grouped_blocks(weight, groups)
    peak, end = 0, 0
    if mask[0]:
        num_copies = 2 if _is_strided(stride) and not transposed else 1
        during = _blocked(grad_out) + num_bytes(weight) + _blocked(x)
        peak, end = max(during, _blocked(x) + num_copies * num_bytes(x)), num_bytes(x)
    if mask[1] and max(weight.shape[2:]) > _LARGEST_DIRECT_KERNEL and x.dtype is torch.float32:
        ends = sum(num_bytes(tensor) for tensor in out if tensor is not None)
        return max(peak - ends, _weight_by_product(x, weight, grad_out, groups))
    if mask[1] or mask[2]:
        num_copies = _parts_of_batch(x, grad_out, weight, math.prod(stride), groups)
        copies = num_copies * num_bytes(weight) + (num_copies > 1) * _BARRIERS_BYTES
        peak = max(peak, end + _blocked(grad_out) + _blocked_input(x) + copies)
    end = sum(num_bytes(tensor) for tensor in out if tensor is not None)
    return max(peak, end + num_bytes(weight) if mask[1] else 0) - end


def _weight_by_product(x: Tensor, weight: Tensor, grad_out: Tensor, groups: int) -> int:
    """Return the bytes of a weight's gradient without a direct kernel: a thread unfolds images and sums four weight copies."""
    columns = x.shape[1] // groups * math.prod(weight.shape[2:]) * math.prod(grad_out.shape[2:]) * x.element_size()
    return min(torch.get_num_threads(), x.shape[0]) * (4 * num_bytes(weight) + columns) + 256


def _takes_onednn(x, weight, stride, dilation, transposed, output_padding, groups) -> bool:
    """Tell whether oneDNN runs the convolution; mirrors `ConvParams::use_mkldnn` of ATen/native/Convolution.cpp."""
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
    """Return the number of partial weight gradients that oneDNN sums: its threads split the batch, or else the channels.

    It chooses the split in which a thread reads and writes least, weights counted eight times (`balance` in
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
    """Return the bytes of a grouped weight's gradient in channels-last: each group's channels are padded to whole blocks."""
    if groups == 1:
        return 0
    block = _block_elements()
    out_per_group = -(-weight.shape[0] // groups // block) * block
    in_per_group = -(-weight.shape[1] // block) * block
    return groups * out_per_group * in_per_group * math.prod(weight.shape[2:]) * weight.element_size()


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Tell whether input or weight is channels-last, so that the kernel copies neither input nor output."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if layout is None:
        return False
    return any(tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous() for tensor in (x, weight))


def _columns(x: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int) -> int:
    """Return the bytes of the unfolded input [n, c_in · kernel, positions of the output]; a 1 × 1 kernel of stride 1 has none.

    Groups run one after the other, and their outputs are concatenated at the end.
    """
    kernel = weight.shape[2:]
    parts = num_bytes(out) if groups > 1 else 0
    if all(size == 1 for size in kernel) and not _is_strided(stride) and not any(padding):
        return parts
    per_group = x.shape[0] * x.shape[1] // groups * math.prod(kernel) * math.prod(out.shape[2:]) * x.element_size()
    return max(per_group, parts)


def _blocked_input(x: Tensor) -> int:
    """Return the bytes of the input's copy in oneDNN's layout; an image of few channels is read without a copy."""
    return 0 if x.shape[1] <= 5 else _blocked(x)


def _blocked(tensor: Tensor) -> int:
    """Return the bytes of the tensor in oneDNN's blocked layout, whose channels are padded to whole blocks."""
    block = _block_elements()
    channels = -(-tensor.shape[1] // block) * block
    return tensor.shape[0] * channels * math.prod(tensor.shape[2:]) * tensor.element_size()


@functools.cache
def _block_elements() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
