"""Prices one ATen call in FLOPs, bytes and, on a known device, seconds; calls with equal signatures are priced once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..artifacts import Device
from ..ops.flops import bytes_moved, flops
from ..torch_internals.repeats import Key, signature
from .time import op_seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """The FLOPs, memory traffic and time of one ATen call."""

    heavy_flops: int
    """The FLOPs of matmul, convolution and attention."""
    other_flops: int
    moved_bytes: int
    """The bytes read and written."""
    time_s: float
    """The seconds on the device; 0 without one."""


class Costs:
    """Prices ATen calls and caches the prices by signature; without a device the seconds are 0.

    >>> import torch
    >>> a, b = torch.zeros(3, 5), torch.zeros(5, 7)
    >>> Costs(None).of(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    Cost(heavy_flops=210, other_flops=0, moved_bytes=284, time_s=0.0)
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._known: dict[Key, Cost] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
        """Return the cost of the call `out = func(*args, **kwargs)`; only shapes and strides are read."""
        key = signature(func, args, kwargs)
        if key is None:
            return self._price(func, args, kwargs, out)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._price(func, args, kwargs, out)
        return found

    def _price(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
        time_s = 0.0
        if self._device is not None:
            time_s = op_seconds(self._device, func, args, kwargs, out) * self._device.factors.get("compute", 1.0)
        return Cost(*flops(func, args, kwargs, out), bytes_moved(func, args, out), time_s)
