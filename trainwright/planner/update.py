"""What an optimizer's step takes, in the form that runs.

fused      one pass: parameter and gradient are read, parameter and states written           (3 p + 2 s) / β + launch
loop       the kernels of the step itself, followed on a parameter without values, each as any other kernel
foreach    the same kernels, each launched once for all parameters
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..artifacts import Device
from ..capture.fakes import new_mode
from ..profiler.saved import CallCost, CallCounter
from ..profiler.values import KnownValues

if TYPE_CHECKING:
    from .costs import OptimizerCost

_SAMPLES = (1 << 12, 1 << 15, 1 << 18, 1 << 21)
"""Elements of the parameters that are followed: a step on another number takes its share of the next larger one."""


@dataclass(eq=False)
class Updates:
    """The times of updates, each kind of parameter followed once."""

    _calls: dict[Any, tuple[CallCost, ...]] = field(default_factory=dict)

    def seconds(self, device: Device, optimizer: OptimizerCost, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the seconds of one parameter's update on `device`."""
        num = math.prod(shape)
        if optimizer.form == "fused" or optimizer.needs_values:
            state = optimizer.state_bytes(shape, dtype)
            launches = 1 if optimizer.form == "fused" else 1 + 4 * (state > num * dtype.itemsize // 2)
            moved = 3 * num * dtype.itemsize + 2 * state
            return moved / device.bandwidth_bytes_per_s + launches * device.launch_s
        sample, share = self._sample(optimizer, shape)
        calls = self._followed(optimizer, sample, dtype)
        launched = 0.0 if optimizer.form == "foreach" and device.kind == "gpu" else 1.0
        return sum(call.seconds(device, share, share) - (1.0 - launched) * device.launch_s for call in calls)

    def _sample(self, optimizer: OptimizerCost, shape: Sequence[int]) -> tuple[tuple[int, ...], float]:
        """The shape that is followed, and the share of its work that `shape` has; of matrices their own."""
        num = math.prod(shape)
        if optimizer.reads not in ("element", "block"):
            return tuple(shape), 1.0
        size = next((size for size in _SAMPLES if size >= num), _SAMPLES[-1])
        return (size,), num / size

    def _followed(self, optimizer: OptimizerCost, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[CallCost, ...]:
        key = (optimizer.identity, shape, dtype)
        if key not in self._calls:
            self._calls[key] = calls_of(optimizer, shape, dtype)
        return self._calls[key]


def calls_of(optimizer: OptimizerCost, shape: Sequence[int], dtype: torch.dtype) -> tuple[CallCost, ...]:
    """Return the kernels of one parameter's second step, for by the first its states are made."""
    counter, mode = CallCounter("cpu"), new_mode()
    with mode, KnownValues(mode, fills_memory=False):
        param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype))
        stepping = optimizer.on_fakes([param])
        param.grad = torch.empty_like(param)
        stepping.step()
        with counter.tracker:
            stepping.step()
    return tuple(counter.calls)
