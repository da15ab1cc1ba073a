"""Predicts the seconds of a GPU kernel from its kind and shape, where the roofline of op_seconds is too coarse.

    products      FLOPs / (rate · filled · k / (k + `_DEPTH`)): `filled` is the share of the scheduled tiles' elements that belong
                  to the result, idle units in the last wave counted, for the best of four tile sizes
    convolutions  FLOPs / their own rate; 16-bit and TF32 ones read channels-last, so tensors in another layout are reordered
                  first, at `reorder_bytes_per_s`; depthwise ones: bytes / (`_DEPTHWISE` · bandwidth)
    attention     FLOPs / (rate · its forward or backward factor · length / (length + `_LENGTHS`)); causal: half of the FLOPs
    batch norm    reads its input twice in the forward, and both inputs twice in the backward, at `_BATCH_NORM` of the bandwidth
    reductions    bytes / (`_SUMMED` · bandwidth); strided copies: bytes / (`_STRIDED` · bandwidth)
    the rest      bytes / bandwidth

The constants are named below with their origin.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..artifacts import Device
from ..artifacts.cluster import AttentionRate
from ..ops.flops import bytes_moved
from ..ops.kernels import Kernel, skips_half
from .kernels.workspace_native import operand_copies

Direction = Literal["forward", "backward"]
# Tile sizes of cuBLAS's kernels, and what the smaller ones reach of the largest: fitted to transformers-bert and timm.
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
_DEPTH = 96
# The length at which attention reaches half of its rate: FlashAttention-2 on an H100, figures 5 and 6 of arXiv:2407.08608
# (309 to 370 TFLOP/s at 512 to 16k forward, 191 to 335 causal, 214 to 322 backward).
_LENGTHS = {"forward": 95, "causal": 300, "backward": 256}
_CUDNN: dict[Direction, AttentionRate] = {"forward": "cudnn forward", "backward": "cudnn backward"}
# Of the bandwidth that plain elementwise kernels reach; fitted to timm and lambda.
_BATCH_NORM, _BATCH_NORM_PASSES = 0.85, {"forward": 1.5, "backward": 5 / 3}
_DEPTHWISE, _STRIDED, _SUMMED = 0.4, 0.9, 0.68
_HALVES = (torch.float16, torch.bfloat16)


def gpu_seconds(device: Device, kernel: Kernel, rate: float, args: tuple[Any, ...], out: Any, func: Any) -> float:
    """Return the seconds of the kernel without its launch; `rate` is the device's FLOPs per second for the kernel's dtype.

    >>> gpu = Device(name="x", kind="gpu", memory_bytes=1, flops_per_s={"fp32": 1e12}, bandwidth_bytes_per_s=1e12,
    ...              launch_s=0.0, num_units=1)
    >>> a = torch.empty(256, 96, device="meta")
    >>> round(gpu_seconds(gpu, Kernel("mm", (256, 96, 128), 2 * 256 * 96 * 128), 1e12, (a, a), a, None), 9)
    1.2583e-05
    """
    bandwidth = device.bandwidth_bytes_per_s
    match kernel.kind:
        case "products":
            copies = 2 * operand_copies([value for value in args if isinstance(value, Tensor)][-2:])
            product_s = kernel.work / (rate * _filled(device.num_units, kernel))
            return max(product_s, _bytes(func, args, out) / bandwidth) + copies / bandwidth
        case "convolutions":
            seconds = max(kernel.work / rate, _bytes(func, args, out) / bandwidth)
            return seconds + _reorder_s(device, _direction(kernel), args, out)
        case "depthwise":
            return _bytes(func, args, out) / (_DEPTHWISE * bandwidth)
        case "attention":
            return max(_attention_s(device, kernel, rate), _bytes(func, args, out) / bandwidth)
        case "batch norms":
            return kernel.work * _BATCH_NORM_PASSES[_direction(kernel)] / (_BATCH_NORM * bandwidth)
        case "strided":
            return kernel.work / (_STRIDED * bandwidth)
        case "reductions":
            return kernel.work / (_SUMMED * bandwidth)
        case "elementwise":
            return kernel.work / bandwidth


def _direction(kernel: Kernel) -> Direction:
    return "backward" if "backward" in kernel.name else "forward"


def _filled(num_units: int, kernel: Kernel) -> float:
    """Return the share of the device's peak rate that a matrix product of this shape reaches."""
    batch, rows, depth, columns = kernel.dims if len(kernel.dims) == 4 else (1, *kernel.dims)
    if min(batch, rows, depth, columns) < 1:
        return 1.0
    best = 0.0
    for height, width, reached in _TILES:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        used = batch * rows * columns / (tiles * height * width)
        waves = math.ceil(tiles / num_units) * num_units
        best = max(best, reached * used * tiles / waves)
    return best * depth / (depth + _DEPTH)


def _reorder_s(device: Device, direction: Direction, args: tuple[Any, ...], out: Any) -> float:
    """Return the seconds of the copies into channels-last and back that a convolution on tensor cores needs."""
    tensors = [args[0], args[1], args[2], *out[:2]] if direction == "backward" else [args[0], args[1], out]
    found = [value for value in tensors if isinstance(value, Tensor) and _is_apart(value)]
    if not found or not device.reorder_bytes_per_s or not _reads_channels_last(device, found[0].dtype):
        return 0.0
    width = found[0].element_size() / 2
    num_bytes = 2 * sum(value.numel() * value.element_size() for value in found)
    return num_bytes / min(device.bandwidth_bytes_per_s, width * device.reorder_bytes_per_s)


def _reads_channels_last(device: Device, dtype: torch.dtype) -> bool:
    return dtype in _HALVES or (dtype is torch.float32 and "tf32" in device.flops_per_s)


def _is_apart(tensor: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return layout is not None and math.prod(tensor.shape[2:]) > 1 and not tensor.is_contiguous(memory_format=layout)


def _attention_s(device: Device, kernel: Kernel, rate: float) -> float:
    direction = _direction(kernel)
    reached = device.attention.get(direction, 0.75)
    if "cudnn" in kernel.name:
        reached = device.attention.get(_CUDNN[direction], reached)
    is_causal = skips_half(kernel)
    work = kernel.work / 2 if is_causal else kernel.work
    half = _LENGTHS["causal" if is_causal and direction == "forward" else direction]
    length = kernel.dims[2] if len(kernel.dims) > 2 else half
    return work / (rate * reached * length / (length + half))


def _bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    return bytes_moved(func, args, out) if func is not None else 0
