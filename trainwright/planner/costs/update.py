"""The seconds of an optimizer's step, in the form that runs.

fused      one pass: parameter and gradient are read, parameter and states written     max((3 p + 2 s) / β, arithmetic / rate)
loop       the kernels of the step itself, followed on a parameter without values; a launch costs less than one that is recorded
           for the backward, which `launch_s` is
foreach    the same kernels, each launched once for all parameters on a GPU, once a parameter without Python on a CPU

Each form has `calls` beside its kernels, which Python makes for each parameter: they decide where parameters are small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...artifacts import Device
from ...profiler.saved import CallCost, CallCounter
from ...profiler.time import rate
from ...profiler.values import KnownValues
from ...torch_internals.fakes import new_mode

if TYPE_CHECKING:
    from .costs import OptimizerCost

_UNRECORDED = 0.5
"""The cost of launching a kernel without autograd, in launches with it: 1.6 of 3.5 us on a core of a Zen 4."""
_IN_A_LIST = 0.3
"""The cost of a `foreach` kernel for one tensor of its list on a CPU, in launches."""
_ON_A_GPU = 1.0
"""The work of a GPU's host for one parameter beside the kernels, in launches; an assumption, not a measurement."""
_IN_PLACE = 1.6
"""The bandwidth of a pass in place on a CPU, over `bandwidth_bytes_per_s`, that of additions into fresh memory."""
_LINE_BYTES = 64
_SAMPLES = (1 << 12, 1 << 15, 1 << 18, 1 << 21)
"""The sizes of the parameters whose update is simulated; another size is charged its share of the next larger one."""


@dataclass(eq=False)
class Updates:
    """Computes the seconds of updates; each kind of parameter is simulated once."""

    _calls: dict[Any, tuple[CallCost, ...]] = field(default_factory=dict)

    def seconds(self, device: Device, optimizer: OptimizerCost, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the seconds of one parameter's update on `device`."""
        num, in_place = math.prod(shape), _in_place(device)
        if optimizer.form == "fused" or optimizer.needs_values:
            state = optimizer.state_bytes(shape, dtype)
            launches = _calls(optimizer, device) + (
                0 if optimizer.form == "fused" else 4 * (state > num * dtype.itemsize // 2)
            )
            moved = 3 * num * dtype.itemsize + 2 * state
            arithmetic_s = optimizer.fused_flops * num / rate(device.flops_per_s, torch.float32)
            return max(moved / in_place.bandwidth_bytes_per_s, arithmetic_s) + launches * device.launch_s
        sample, share = self._sample(optimizer, shape)
        calls = self._followed(optimizer, sample, dtype)
        launched = _launches(optimizer.form, device.kind)
        kernels_s = sum(call.seconds(in_place, share, share) - (1.0 - launched) * device.launch_s for call in calls)
        return max(kernels_s, 0.0) + _calls(optimizer, device) * device.launch_s

    def _sample(self, optimizer: OptimizerCost, shape: Sequence[int]) -> tuple[tuple[int, ...], float]:
        """Return the shape that is simulated, and the share of its work that `shape` has.

        Optimizers that read more than blocks are simulated on the shape itself.
        """
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


def _in_place(device: Device) -> Device:
    """Return the device with the bandwidth of updates in place; measured kernels keep their measured times."""
    faster = _IN_PLACE if device.kind == "cpu" else 1.0
    return device.model_copy(update={"bandwidth_bytes_per_s": faster * device.bandwidth_bytes_per_s})


def _launches(form: str, kind: str) -> float:
    if form == "foreach":
        return 0.0 if kind == "gpu" else _IN_A_LIST
    return 1.0 if kind == "gpu" else _UNRECORDED


def _calls(optimizer: OptimizerCost, device: Device) -> float:
    """Return the host's work for a parameter, in launches; it was measured on CPUs, and is assumed on GPUs."""
    return optimizer.calls if device.kind == "cpu" else _ON_A_GPU


class _LineCounter(CallCounter):
    """Counts calls, and charges each lookup in a table one cache line: 8-bit methods look their codes up one by one."""

    def _on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        super()._on_op(func, args, kwargs, out)
        if getattr(func, "overloadpacket", None) is torch.ops.aten.index_select:
            found = self.calls[-1]
            self.calls[-1] = replace(found, num_bytes=found.num_bytes + _LINE_BYTES * args[2].numel(), kernel=None)


def calls_of(optimizer: OptimizerCost, shape: Sequence[int], dtype: torch.dtype) -> tuple[CallCost, ...]:
    """Return the kernels of one parameter's second step; the first one makes the states."""
    counter, mode = _LineCounter("cpu"), new_mode()
    with mode, KnownValues(mode, fills_memory=False):
        param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype))
        stepping = optimizer.on_fakes([param])
        param.grad = torch.empty_like(param)
        stepping.step()
        with counter.tracker:
            stepping.step()
    return tuple(counter.calls)
