"""Runs one training step under observation: tracks its memory, prices its calls and assigns both to modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..artifacts import Device, Link, MemoryPoint, ModuleCost
from ..torch_internals.trees import tensors_in
from .caching import CachingAllocator
from .compiled import CompiledStep
from .gpu import GpuForms
from .kernels.gpu_workspace import NUM_BLAS_THREADS
from .modules import ModuleTrace
from .steady import Gradients, gradients_of, plain_state, rehearse_update
from .step import LossFn, reference_step
from .totals import Totals, module_costs
from .tracker import MemoryTracker
from .values import KnownValues

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Question:
    """The model to be profiled and every setting that decides how its step is run."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None = None
    autocast: str | None = None
    accumulate: int = 1
    device: Device | None = None
    """The device for which memory and time are predicted; None for a CPU without times."""
    timeline: bool = True
    links: tuple[Link, ...] = ()
    """The device's links to others, where the step is one of several processes."""
    keep_grads: bool = False
    """True where `zero_grad` writes zeros (`set_to_none=False`), so that gradients live from step to step."""
    clip_norm: float | None = None
    """The norm to which gradients are clipped before the update; None: they are not."""
    expandable_segments: bool = False
    """True where the GPU's caching allocator uses expandable segments."""
    compile: bool = False
    """True where the step is that of the model under `torch.compile`."""
    cuda_graphs: bool = False
    """True where the compiled graphs are replayed as CUDA graphs (`mode="reduce-overhead"`)."""


class ObservedStep:
    """Runs a steady-state step under observation and holds the results; its hooks stay in the model, so pass a copy."""

    def __init__(self, question: Question, values: KnownValues | None = None) -> None:
        self.question, self.model = question, question.model
        self.values = values
        """The mode that executes the step on fake tensors; None where the step is real."""
        self.totals = Totals(question.device, question.links)
        self.tracker = MemoryTracker(question.device.kind if question.device else "cpu", on_op=self._on_op)
        self.is_gpu = self.tracker.target == "gpu"
        if question.device is not None and self.is_gpu:
            self.tracker.allocator = CachingAllocator(question.device.memory_bytes, question.expandable_segments)
        # compiled code would be compiled again for the hooks; it says its modules itself
        if not question.compile:
            self.trace = ModuleTrace(self.model, self._enter)
        self.static: dict[str, int] = {}
        self.grad_bytes = self.optimizer_bytes = 0
        self.saved_by_path: dict[str, int] = {}
        self.compiled: CompiledStep | None = None

    def go(self, make_optimizer: MakeOptimizer, rehearse: bool = True) -> None:
        """Run and report a steady-state step: the first one if nothing changes after it, else the second.

        rehearse: let the optimizer make its state from fake gradients before the first step.
        """
        with self.tracker:
            self._watch()
            optimizer = self._make(make_optimizer)
            rehearsed = self._rehearse(optimizer) if rehearse else None
            if rehearse and rehearsed is None:
                del optimizer
                optimizer = self._make(make_optimizer)
            left_as_found = self._report(optimizer)
            if rehearsed is not None and rehearsed != gradients_of(self.model):
                del optimizer  # its state goes before that of the next one comes
                optimizer = self._make(make_optimizer)
                with self.phase("update"):
                    optimizer.step()
            elif rehearsed is not None and left_as_found and not self.question.keep_grads:
                return
            self._report(optimizer)

    def _make(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """Return a new optimizer; state that its constructor allocates counts as optimizer state."""
        with self.phase("update"):
            return make_optimizer(self.model.parameters())

    def _watch(self) -> None:
        self.tracker.watch(tensors_in(self.question.batch), "input")
        for name, param in self.model.named_parameters():
            self._enter(name.rpartition(".")[0])
            self.tracker.watch([param], "param")
        self._enter("")
        self.tracker.watch(self.model.buffers(), "buffer")
        self.static = self.tracker.live_breakdown
        if self.question.device is not None and self.is_gpu:
            for _ in range(NUM_BLAS_THREADS):
                self.tracker.hold(self.question.device.blas_workspace_bytes)

    def _rehearse(self, optimizer: torch.optim.Optimizer) -> Gradients | None:
        with self.phase("update"):
            return rehearse_update(optimizer, self.model, self.tracker.unseen())

    def _report(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run and report one step; return whether it left the model in the state in which it found it."""
        self._place_states(optimizer)
        self.tracker.keep_timeline = self.question.timeline
        self.tracker.reset_peak()
        self.totals.clear()
        found, kept = plain_state(self.model), self._kept_bytes()
        self._step(optimizer)
        return plain_state(self.model) == found and self._kept_bytes() == kept

    def _kept_bytes(self) -> int:
        alive = self.tracker.live_breakdown
        return alive["saved"] + alive["other"] + alive["buffer"]

    def modules(self) -> tuple[ModuleCost, ...]:
        """Return each module's cost, submodules included, in the model's order."""
        at_peak = self.tracker.peak_by_place() if self.question.timeline else {}
        return module_costs(self.model, self.totals, self.saved_by_path, at_peak)

    def breakdown(self) -> dict[str, int]:
        """Return the bytes alive at the peak, by category."""
        return {category: size for category, size in self.tracker.peak_breakdown.items() if size}

    def timed_timeline(self) -> tuple[MemoryPoint, ...]:
        """Return the tracker's timeline, with each op's seconds where the device is known."""
        if self.totals.device is None:
            return tuple(self.tracker.timeline)
        timed = zip(self.tracker.timeline, self.totals.op_s)
        return tuple(point.model_copy(update={"time_s": time_s}) for point, time_s in timed)

    @property
    def reserved_bytes(self) -> int | None:
        """Return the peak of the bytes that the GPU's caching allocator reserves; None without one."""
        return None if self.tracker.allocator is None else self.tracker.allocator.peak_reserved_bytes

    # What the step tells its observer

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._enter("")
        forms = GpuForms() if self.is_gpu and name != "update" else nullcontext()
        numbers = self.values.standing_in() if self.values is not None and name == "update" else nullcontext()
        with self.tracker.phase(name), forms, numbers:
            yield
        if name == "backward":  # wrappers set gradients past the hooks of autograd
            grads = [param.grad for param in self.model.parameters() if param.grad is not None]
            self.tracker.watch(grads, "grad")

    def mark_forward_end(self) -> None:
        self.tracker.mark_forward_end()
        self.saved_by_path = self.tracker.saved_by_path()

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        asked = self.question
        reference_step(
            self.model,
            optimizer,
            asked.batch,
            asked.loss_fn,
            autocast=asked.autocast,
            accumulate=asked.accumulate,
            keep_grads=asked.keep_grads,
            clip_norm=asked.clip_norm,
            clips_lists=self.is_gpu,
            observer=self,
        )
        alive = self.tracker.live_breakdown
        self.grad_bytes, self.optimizer_bytes = alive["grad"], alive["optimizer"]

    def _place_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign the optimizer's state to the modules whose parameters it belongs to."""
        paths = {id(param): name.rpartition(".")[0] for name, param in self.model.named_parameters()}
        for param, state in getattr(optimizer, "state", {}).items():
            self.tracker.place(tensors_in(state), paths.get(id(param), ""))

    def _enter(self, path: str) -> None:
        self.tracker.path = path

    def _on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.totals.add(self.tracker.current_phase, self.tracker.path, func, args, kwargs, out)
