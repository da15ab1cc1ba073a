"""Sums the costs of a step's calls by phase, module and op, and predicts the step's time from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ..artifacts import Device, Link, ModuleCost, OpCost, Overheads
from ..artifacts.cluster import axis_over
from ..hardware import collectives
from .cost import Costs
from .modules import block_patterns
from .processes import Communication, collective_of, is_prefetched, waits
from .tracker import packet_name

_MAX_OPS = 200
"""The length of the list of hottest ops."""


@dataclass(slots=True)
class _Tally:
    """Sums of the calls of one op in one module, without its submodules, in one phase."""

    heavy: int = 0
    other: int = 0
    num_ops: int = 0
    moved_bytes: int = 0
    time_s: float = 0.0


class Totals:
    """Sums FLOPs, calls, bytes and seconds by phase, module and op, and keeps the predicted clock of the step."""

    def __init__(self, device: Device | None, links: tuple[Link, ...] = ()) -> None:
        self.device, self.links = device, links
        """The device's links to others, where the step is one of several processes."""
        self.compiled_host_s: float | None = None
        """The host's seconds per kernel while a compiled graph runs; None outside of one."""
        self._costs = Costs(device)
        self.overheads = Overheads() if device is None else device.overheads
        self._is_gpu = device is not None and device.kind == "gpu"
        self.clear()

    def clear(self) -> None:
        self.tallies: dict[tuple[str, str, Any], _Tally] = defaultdict(_Tally)
        self.op_s: list[float] = []
        """The seconds of each call, in order."""
        self.step_s = 0.0
        self._underway_s = 0.0
        """On a CPU, the overheads of views, to be added to the next kernel; on a GPU, the host's clock."""
        self._beside = Communication()
        self._waited_s = 0.0
        self._phase = ""

    def add(self, phase: str, path: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.links and self._travels(phase, func, args, out):
            return
        cost = self._costs.of(func, args, kwargs, out)
        tally = self.tallies[phase, path, func]
        tally.heavy += cost.heavy_flops
        tally.other += cost.other_flops
        tally.num_ops += 1
        tally.moved_bytes += cost.moved_bytes
        time_s = self._with_overhead(phase, cost.time_s)
        tally.time_s += time_s
        self.op_s.append(self._took(time_s))
        self.step_s += time_s

    def add_kernel(self, phase: str, path: str, func: Any, ops: int, moved_bytes: int, kernel_s: float) -> None:
        """Add a kernel of a compiled graph: `str(func)` is its name, `ops` the number of its elementwise operations."""
        tally = self.tallies[phase, path, func]
        tally.other += ops
        tally.num_ops += 1
        tally.moved_bytes += moved_bytes
        time_s = self._with_overhead(phase, kernel_s)
        tally.time_s += time_s
        self.op_s.append(self._took(time_s))
        self.step_s += time_s

    def enter_graph(self) -> None:
        """Add the host's overhead of calling a compiled graph."""
        self._underway_s += self.overheads.graph_s

    def _took(self, time_s: float) -> float:
        """Return the op's seconds plus the wait for collectives before it, so that all ops' seconds add up to the step's."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return time_s + waited_s

    def _travels(self, phase: str, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """Issue the op if it is a collective, and return whether it is one; wait for those issued if the op needs their results."""
        if waits(func) or (phase == "update") != (self._phase == "update"):
            before, self.step_s = self.step_s, self._beside.arrived(self.step_s)
            self._waited_s += self.step_s - before
        self._phase = phase
        found = collective_of(func, args, out)
        if found is None:
            return False
        kind, num_bytes, ranks = found
        seconds = collectives.seconds(kind, axis_over(self.links, ranks), num_bytes)
        (self._beside.gather if is_prefetched(func) else self._beside.reduce)(self.step_s, seconds)
        self.tallies[phase, "", func].num_ops += 1
        self.op_s.append(self._took(0.0))
        return True

    def _with_overhead(self, phase: str, kernel_s: float) -> float:
        """Return the seconds that a call adds to the step: its kernel's, and the host's overhead that no kernel hides."""
        if self._is_gpu:
            return self._behind_the_host(phase, kernel_s)
        self._underway_s += self._host_s(phase)
        if not kernel_s:  # a view: the next kernel bears what has come up
            return 0.0
        underway_s, self._underway_s = self._underway_s, 0.0
        return kernel_s + underway_s

    def _behind_the_host(self, phase: str, kernel_s: float) -> float:
        """Return the seconds that a call adds on a GPU, which idles until the host has issued the kernel if the host is behind."""
        if not kernel_s:
            self._underway_s += self.overheads.view_s
            return 0.0
        self._underway_s += self._host_s(phase)
        return max(self._underway_s - self.step_s, 0.0) + kernel_s

    def _host_s(self, phase: str) -> float:
        if self.compiled_host_s is not None:
            return self.compiled_host_s
        return float(getattr(self.overheads, f"{phase}_s", 0.0))

    def total(self, phase: str | None, what: str) -> int:
        return sum(getattr(tally, what) for key, tally in self.tallies.items() if phase in (None, key[0]))

    def hottest(self, model: nn.Module) -> tuple[OpCost, ...]:
        """Return the ops that take longest (without a device: have the most FLOPs), summed over repeated blocks."""
        patterns = block_patterns(model)
        sums: dict[tuple[str, str, str], _Tally] = defaultdict(_Tally)
        for (phase, path, func), tally in self.tallies.items():
            total = sums[packet_name(func), patterns.get(path, path), phase]
            for field in fields(_Tally):
                setattr(total, field.name, getattr(total, field.name) + getattr(tally, field.name))
        ordered = sorted(sums.items(), key=lambda item: (-item[1].time_s, -item[1].heavy, -item[1].moved_bytes))
        is_timed = self.device is not None
        return tuple(_op_cost(*key, tally, is_timed) for key, tally in ordered[:_MAX_OPS] if tally.moved_bytes)


def module_costs(
    model: nn.Module,
    totals: Totals,
    saved: Mapping[str, int],
    at_peak: Mapping[tuple[str, str], int],
) -> tuple[ModuleCost, ...]:
    """Return each module's cost, submodules included, in the model's order.

    saved: bytes that autograd holds, by module. at_peak: bytes alive at the peak, by module and category.
    """
    below, alive = _Rollup(totals.tallies, saved), _alive_below(at_peak)
    is_timed = totals.device is not None
    return tuple(
        ModuleCost(
            path=path,
            type=type(module).__name__,
            num_params=sum(param.numel() for param in module.parameters()),
            param_bytes=sum(param.numel() * param.element_size() for param in module.parameters()),
            saved_bytes=below.saved[path],
            forward_flops=below.flops["forward", path],
            backward_flops=below.flops["backward", path],
            num_ops=below.num_ops[path],
            forward_s=below.time_s["forward", path] if is_timed else None,
            backward_s=below.time_s["backward", path] if is_timed else None,
            at_peak_bytes=alive.get(path, {}),
        )
        for path, module in model.named_modules()
    )


class _Rollup:
    """Sums tallies over each module and its submodules."""

    def __init__(self, tallies: dict[tuple[str, str, Any], _Tally], saved: Mapping[str, int]) -> None:
        self.flops: dict[tuple[str, str], int] = defaultdict(int)
        self.time_s: dict[tuple[str, str], float] = defaultdict(float)
        self.num_ops: dict[str, int] = defaultdict(int)
        self.saved: dict[str, int] = defaultdict(int)
        for (phase, path, _), tally in tallies.items():
            for above in _ancestors(path):
                self.flops[phase, above] += tally.heavy
                self.time_s[phase, above] += tally.time_s
                self.num_ops[above] += tally.num_ops
        for path, num_bytes in saved.items():
            for above in _ancestors(path):
                self.saved[above] += num_bytes


def _alive_below(at_peak: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Return the bytes alive at the peak in each module and its submodules, by category."""
    alive: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (path, category), num_bytes in at_peak.items():
        for above in _ancestors(path):
            alive[above][category] += num_bytes
    return {path: dict(sizes) for path, sizes in alive.items()}


def _op_cost(op: str, path: str, phase: str, tally: _Tally, is_timed: bool) -> OpCost:
    return OpCost(
        op=op,
        path=path,
        phase=phase,
        calls=tally.num_ops,
        flops=tally.heavy + tally.other,
        moved_bytes=tally.moved_bytes,
        time_s=tally.time_s if is_timed else None,
    )


def _ancestors(path: str) -> list[str]:
    """Return the path and those of its parents: `a.b` → `a.b`, `a`, and the root (empty)."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
