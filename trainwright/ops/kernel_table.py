"""`KernelTable`: the seconds of a kernel from those that were measured, by interpolation between sizes.

In logarithms, the rate of a kernel is a linear function of its sizes near a place: the one that fits the measured rates
of its kind best, each weighted by its distance from that place. A measured size gives back its own rate; beyond the
table the nearest ones lead on, as far as `_BEYOND` allows. A kernel that was not measured is told by the one that stands for
its family.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from .kernels import Kernel, stand_ins

_SIBLINGS = {"fp16": "bf16", "bf16": "fp32", "fp64": "fp32"}
_NEAREST = 1e-3
"""Squared distance under which a size counts as the measured one."""
_STIFFNESS = 0.02
"""Of the slopes, against the weights' sum: keeps a direction level in which nothing was measured."""
_BEYOND = (math.log(8.0), math.log(1.25))
"""How far below the lowest and above the highest measured rate an estimate may lie."""


class KernelTable:
    """The measured kernels of one device: `"mm fp32"` → rows of sizes and, last, the work per second.

    >>> table = KernelTable({"mul fp32": [[1000.0, 1e9], [100000.0, 1e10]]})
    >>> round(table.seconds(Kernel("mul", (10000,), 10000), "fp32") * 1e6, 1)
    3.2
    """

    def __init__(self, rows: Mapping[str, Sequence[Sequence[float]]]) -> None:
        self._points: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
        for key, entries in rows.items():
            name, _, dtype = key.partition(" ")
            for *sizes, work_per_s in entries:
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
        here = np.array([math.log(max(size, 1)) for size in dims])
        return math.exp(_interpolated(here, np.array([place for place, _ in points]), np.array([y for _, y in points])))

    def _measured(self, name: str, dtype: str, num_dims: int) -> list[tuple[tuple[float, ...], float]] | None:
        """The points of the kernel, else of what stands for it, in this dtype, else in the one that stands for it."""
        kind: str | None = dtype
        while kind is not None:
            for candidate in stand_ins(name):
                points = self._points.get((candidate, kind))
                if points and len(points[0][0]) == num_dims:
                    return points
            kind = _SIBLINGS.get(kind)
        return None


def _interpolated(here: np.ndarray, places: np.ndarray, log_rates: np.ndarray) -> float:
    """The value at `here` of the plane that fits the measured points best, near ones first."""
    steps = places - here
    distances = np.maximum((steps**2).sum(axis=1), _NEAREST)
    weights = distances ** -(2.0 + 0.5 * len(here))
    weights /= weights.sum()
    level = float(weights @ log_rates)
    centre = weights @ steps
    around = steps - centre
    spread = (around * weights[:, None]).T @ around
    slopes = np.linalg.solve(
        spread + _STIFFNESS * max(float(np.trace(spread)), 1e-9) / len(here) * np.eye(len(here)),
        (around * weights[:, None]).T @ (log_rates - level),
    )
    value = level - float(centre @ slopes)
    below, above = _BEYOND
    return min(max(value, float(log_rates.min()) - below), float(log_rates.max()) + above)
