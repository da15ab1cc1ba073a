"""`KernelTable`: the seconds of a kernel from those that were measured, by interpolation between sizes.

The rate of a kernel is the mean of the measured rates of its kind, in logarithms, each weighted by the inverse square
of its distance in the logarithms of the sizes: a measured size gives back its own rate, sizes beyond the table the
nearest ones. A kernel that was not measured is told by the one that stands for its family.
"""

from __future__ import annotations

import math
from collections import defaultdict

from ..artifacts import Device
from ..ops.kernels import Kernel, family

_SIBLINGS = {"fp16": "bf16", "bf16": "fp32", "fp64": "fp32"}
_NEAREST = 1e-3
"""Squared distance under which a size counts as the measured one."""


def table_of(device: Device) -> KernelTable:
    """Return the device's table, made once."""
    known = _TABLES.get(id(device))
    if known is None or known[0] is not device:
        known = _TABLES[id(device)] = (device, KernelTable(device))
    return known[1]


class KernelTable:
    """The measured kernels of one device."""

    def __init__(self, device: Device) -> None:
        self._points: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
        for key, rows in device.kernels.items():
            name, _, dtype = key.partition(" ")
            for *sizes, work_per_s in rows:
                logs = tuple(math.log(max(size, 1)) for size in sizes)
                self._points[name, dtype].append((logs, math.log(work_per_s)))
        self._rates: dict[tuple[str, str, tuple[int, ...]], float | None] = {}

    def seconds(self, kernel: Kernel, dtype: str) -> float | None:
        """Return the kernel's seconds; `None` where neither it nor its family was measured."""
        key = (kernel.name, dtype, kernel.dims)
        if key not in self._rates:
            self._rates[key] = self._rate(*key)
        rate = self._rates[key]
        return None if rate is None else kernel.work / rate

    def _rate(self, name: str, dtype: str, dims: tuple[int, ...]) -> float | None:
        points = self._measured(name, dtype, len(dims))
        if points is None:
            return None
        logs = [math.log(max(size, 1)) for size in dims]
        total = weights = 0.0
        for place, log_rate in points:
            distance = sum((one - other) ** 2 for one, other in zip(logs, place))
            weight = 1.0 / max(distance, _NEAREST) ** (1.0 + 0.5 * len(dims))
            total += weight * log_rate
            weights += weight
        return math.exp(total / weights)

    def _measured(self, name: str, dtype: str, num_dims: int) -> list[tuple[tuple[float, ...], float]] | None:
        """The points of the kernel, else of its family, in this dtype, else in the one that stands for it."""
        kind: str | None = dtype
        while kind is not None:
            for candidate in (name, name.removesuffix("_causal"), family(name)):
                points = self._points.get((candidate, kind))
                if points and len(points[0][0]) == num_dims:
                    return points
            kind = _SIBLINGS.get(kind)
        return None


_TABLES: dict[int, tuple[Device, KernelTable]] = {}
