"""`profile`: what a training step of a model costs, found by running the user's own model on tensors without memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import Cluster, Device, ModuleCost, Profile
from ..capture.export import as_batch
from ..capture.export_errors import explained
from ..capture.fakes import FakeMode, fake_like, faked, new_mode
from ..ops.flops import flops
from .modules import ModuleTrace
from .step import DTYPES, LossFn, reference_step
from .time import op_seconds
from .tracker import MemoryTracker
from .values import KnownValues, keeps_values

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    make_optimizer: MakeOptimizer | None = None,
    optimizer: str = "adamw",
    autocast: str | None = None,
    hardware: Cluster | None = None,
    name: str = "",
    capture_s: float | None = None,
    timeline: bool = True,
) -> Profile:
    """Predict memory, FLOPs and time of a steady-state training step without running it or taking its memory.

    Two steps of `reference_step` run on fake CPU tensors; the second one is reported. `model` (on any device, meta
    included) and `batch` are not touched. `make_optimizer(params)` defaults to AdamW; `optimizer` is its name in the
    report. `autocast` is a dtype name (`"bf16"`). With `hardware` the step's time is predicted on one of its devices,
    and a GPU's differences from the CPU are modelled. `UserError` when the model cannot run without values.

    >>> costs = profile(nn.Linear(30, 20, bias=False), (torch.zeros(10, 30),), loss_fn=lambda out, batch: out.sum())
    >>> costs.num_params, costs.forward_flops, costs.backward_flops
    (600, 12000, 12000)
    >>> costs.grad_bytes, costs.optimizer_bytes
    (2400, 4804)
    """
    start = time.perf_counter()
    device = hardware.device if hardware is not None else None
    mode = new_mode()
    batch = as_batch(batch)
    with faked(model, mode) as copy, explained(model, batch):
        run = _Run(copy.train(), _fake_batch(batch, mode), loss_fn, autocast, device, timeline)
        with KnownValues(mode):
            run.go(make_optimizer or _adamw)
    return Profile(
        model=name or type(model).__name__,
        dtype=_dtype_name(model),
        optimizer=optimizer,
        target=device.name if device is not None else "cpu",
        num_params=sum(param.numel() for param in model.parameters()),
        grad_bytes=run.grad_bytes,
        optimizer_bytes=run.optimizer_bytes,
        param_bytes=run.static["param"],
        buffer_bytes=run.static["buffer"],
        saved_bytes=run.tracker.saved_bytes,
        peak_bytes=run.tracker.peak_bytes,
        peak_at=run.tracker.peak_at,
        forward_flops=run.costs.total("forward", "heavy"),
        backward_flops=run.costs.total("backward", "heavy"),
        other_flops=run.costs.total(None, "other"),
        num_ops=run.tracker.num_ops,
        step_s=run.costs.step_s if device is not None else None,
        capture_s=capture_s,
        profile_s=time.perf_counter() - start,
        modules=run.modules(),
        timeline=tuple(run.tracker.timeline),
        notes=() if autocast is None else (f"autocast to {autocast}",),
    )


@dataclass(slots=True)
class _Tally:
    """What the calls of one module (not those below it) cost in one phase."""

    heavy: int = 0
    other: int = 0
    num_ops: int = 0


class _Costs:
    """FLOPs, ops and seconds, by module and phase."""

    def __init__(self, device: Device | None) -> None:
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.tallies: dict[tuple[str, str], _Tally] = defaultdict(_Tally)
        self.step_s = 0.0

    def add(self, phase: str, path: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        heavy, other = flops(func, args, kwargs, out)
        tally = self.tallies[phase, path]
        tally.heavy += heavy
        tally.other += other
        tally.num_ops += 1
        if self.device is not None:
            self.step_s += op_seconds(self.device, func, args, kwargs, out)

    def total(self, phase: str | None, what: str) -> int:
        return sum(getattr(tally, what) for key, tally in self.tallies.items() if phase in (None, key[0]))


class _Run:
    """The two fake steps of one profile, and what they left behind."""

    def __init__(self, model, batch, loss_fn, autocast, device: Device | None, timeline: bool) -> None:
        self.model, self.batch, self.loss_fn, self.autocast = model, batch, loss_fn, autocast
        self.costs = _Costs(device)
        self.tracker = MemoryTracker(device.kind if device else "cpu", on_op=self._on_op)
        self.timeline = timeline
        self.trace = ModuleTrace(model, self._enter)
        self.static: dict[str, int] = {}
        self.grad_bytes = self.optimizer_bytes = 0
        self.saved_by_path: dict[str, int] = {}

    def go(self, make_optimizer: MakeOptimizer) -> None:
        optimizer = make_optimizer(self.model.parameters())
        with self.tracker:
            self.tracker.watch(_tensors(self.batch), "input")
            self.tracker.watch(self.model.parameters(), "param")
            self.tracker.watch(self.model.buffers(), "buffer")
            self.static = self.tracker.live_breakdown
            self._step(optimizer)
            self.tracker.reset_peak()
            self.tracker.keep_timeline = self.timeline
            self.costs.clear()
            self._step(optimizer)

    def modules(self) -> tuple[ModuleCost, ...]:
        """Return each module's cost, all below it included, in the model's order."""
        below = _Rollup(self.costs.tallies, self.saved_by_path)
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
            )
            for path, module in self.model.named_modules()
        )

    # What the step tells its observer

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._enter("")
        with self.tracker.phase(name):
            yield

    def mark_forward_end(self) -> None:
        self.tracker.mark_forward_end()
        self.saved_by_path = self.tracker.saved_by_path()

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        reference_step(self.model, optimizer, self.batch, self.loss_fn, autocast=self.autocast, observer=self)
        alive = self.tracker.live_breakdown
        self.grad_bytes, self.optimizer_bytes = alive["grad"], alive["optimizer"]

    def _enter(self, path: str) -> None:
        self.tracker.path = path

    def _on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.costs.add(self.tracker.current_phase, self.tracker.path, func, args, kwargs, out)


class _Rollup:
    """Sums over each module and all below it."""

    def __init__(self, tallies: dict[tuple[str, str], _Tally], saved: dict[str, int]) -> None:
        self.flops: dict[tuple[str, str], int] = defaultdict(int)
        self.num_ops: dict[str, int] = defaultdict(int)
        self.saved: dict[str, int] = defaultdict(int)
        for (phase, path), tally in tallies.items():
            for above in _ancestors(path):
                self.flops[phase, above] += tally.heavy
                self.num_ops[above] += tally.num_ops
        for path, num_bytes in saved.items():
            for above in _ancestors(path):
                self.saved[above] += num_bytes


def _ancestors(path: str) -> list[str]:
    """Return the path and all above it: `a.b` → `a.b`, `a`, and the root (empty)."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=False, fused=False)


def _fake_batch(value: Any, mode: FakeMode) -> Any:
    """Return the batch with fakes in place of its tensors, in dicts, tuples and lists; small integers keep values."""
    if isinstance(value, Tensor):
        if keeps_values(value):
            return value.clone()
        return fake_like(value.detach(), mode).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _fake_batch(item, mode) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_fake_batch(item, mode) for item in value])
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _dtype_name(model: nn.Module) -> str:
    """The name of the dtype that most parameters have."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for param in model.parameters():
        sizes[param.dtype] += param.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return next((name for name, dtype in DTYPES.items() if dtype is most), str(most).removeprefix("torch."))
