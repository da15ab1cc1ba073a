"""What a module can be measured by: memory, time, FLOPs, parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..artifacts import ModuleCost
from .units import format_bytes, format_count, format_flops, format_s


@dataclass(frozen=True)
class Measure:
    """One number of a module, what it is called, and how it is written."""

    label: str
    read: Callable[[ModuleCost], float]
    shown: Callable[[float], str]


def at_peak_bytes(cost: ModuleCost) -> int:
    """Return what is alive in a module at the peak of the step."""
    return sum(cost.at_peak_bytes.values())


def time_s(cost: ModuleCost) -> float:
    """Return the seconds of a module's forward and backward; 0 where the hardware is not known."""
    return (cost.forward_s or 0.0) + (cost.backward_s or 0.0)


def num_flops(cost: ModuleCost) -> int:
    """Return the FLOPs of a module's forward and backward."""
    return cost.forward_flops + cost.backward_flops


MEASURES = {
    "memory": Measure("alive at the peak", at_peak_bytes, format_bytes),
    "time": Measure("time", time_s, format_s),
    "flops": Measure("FLOPs", num_flops, format_flops),
    "params": Measure("parameter bytes", lambda cost: cost.param_bytes, format_bytes),
    "saved": Measure("saved bytes", lambda cost: cost.saved_bytes, format_bytes),
    "ops": Measure("ops", lambda cost: cost.num_ops, lambda count: f"{format_count(count)} ops"),
}
"""The first four are what a tree of modules can be sorted by."""
SORTABLE = ("memory", "time", "flops", "params")
