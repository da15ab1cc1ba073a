"""Predicts the seconds of one call on a device by a roofline: the larger of arithmetic and memory traffic, plus a launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..artifacts import Device
from ..ops.flops import bytes_moved, flops, is_convolution, moves_nothing
from ..ops.kernel_table import KernelTable
from ..ops.kernels import kernel_of, skips_half
from .gpu_time import gpu_seconds

_RATE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NARROWER = {"fp16": "bf16", "bf16": "fp16"}


def op_seconds(
    device: Device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, dtype: torch.dtype | None = None
) -> float:
    """Return the seconds of `out = func(*args, **kwargs)` on `device`: max(FLOPs/rate, bytes/bandwidth) + launch.

    Measured kernels replace the roofline where the device has them, and gpu_time.py does for GPUs whose number of units is known.
    Only shapes are read, so tensors may be fake. `dtype` is that of the arithmetic; by default, that of the first floating
    output or argument. A view takes no time.

    >>> gpu = Device(name="x", kind="gpu", memory_bytes=1, flops_per_s={"fp32": 1e12}, bandwidth_bytes_per_s=1e12,
    ...              launch_s=0.0)
    >>> a = torch.empty(1000, 1000, device="meta")
    >>> op_seconds(gpu, torch.ops.aten.mm.default, (a, a), {}, a)
    0.002
    """
    if moves_nothing(func):
        return 0.0
    if device.kernels:
        measured_s = table_of(device).seconds(
            kernel_of(func, args, kwargs, out), dtype_name(dtype or _dtype_of(out) or _dtype_of(args))
        )
        if measured_s is not None:
            return measured_s
    if device.kind == "gpu" and device.num_units:
        found = dtype or _dtype_of(out) or _dtype_of(args) or torch.float32
        reached = rate(_rates(device, func), found)
        return gpu_seconds(device, kernel_of(func, args, kwargs, out), reached, args, out, func) + device.launch_s
    heavy, other = flops(func, args, kwargs, out)
    compute_s = 0.0
    if heavy or other:
        skipped = 0.5 if heavy and skips_half(kernel_of(func, args, kwargs, out)) else 1.0
        reached = rate(_rates(device, func), dtype or _dtype_of(out) or _dtype_of(args) or torch.float32)
        compute_s = skipped * heavy / reached
    return max(compute_s, bytes_moved(func, args, out) / device.bandwidth_bytes_per_s) + device.launch_s


def _rates(device: Device, func: Any) -> dict[str, float]:
    return device.conv_flops_per_s if is_convolution(func) and device.conv_flops_per_s else device.flops_per_s


def table_of(device: Device) -> KernelTable:
    """Return the device's table of measured kernels; it is built once a device."""
    known = _TABLES.get(id(device))
    if known is None or known[0] is not device:
        known = _TABLES[id(device)] = (device, KernelTable(device.kernels))
    return known[1]


def rate(rates: dict[str, float], dtype: torch.dtype) -> float:
    """Return the FLOPs per second for `dtype`.

    Without a rate of its own, a 16-bit dtype has that of the other one; any dtype then has that of fp32 or fp64, else the lowest
    that is listed.

    >>> rate({"fp32": 1.0, "bf16": 2.0}, torch.float16)
    2.0
    """
    name = _RATE_NAMES.get(dtype, "fp32")
    for candidate in (name, _NARROWER.get(name, ""), "fp32", "fp64"):
        if rates.get(candidate):
            return rates[candidate]
    known = [value for value in rates.values() if value > 0]
    if not known:
        raise ValueError("a device needs a rate in `flops_per_s` for at least one dtype; got none")
    return min(known)


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the key of `dtype` in a device's rates; "fp32" for a dtype without one."""
    return _RATE_NAMES.get(dtype, "fp32") if dtype is not None else "fp32"


def _dtype_of(value: Any) -> torch.dtype | None:
    if isinstance(value, Tensor):
        return value.dtype if value.is_floating_point() else None
    if isinstance(value, (tuple, list)):
        return next((found for item in value if (found := _dtype_of(item)) is not None), None)
    return None


_TABLES: dict[int, tuple[Device, KernelTable]] = {}
