"""Measures what the real allocators do while a step runs: the oracle of every prediction in this package.

The records of the CPU's are the allocator's own, written by `torch.profiler` (`profile_memory=True`) and read back from its trace.
They start at zero: memory allocated before is not counted, and neither is its release. So the peak of a training step
is *static bytes* (parameters and buffers, `static_bytes`) plus the largest running sum of the records,
for steps that begin without gradients and without optimizer state.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..caching import MIN_BLOCK_BYTES

_STEP = "trainwright::step"
_FORWARD = "trainwright::forward"


@dataclass(frozen=True)
class AllocatorEvent:
    """One allocation (positive) or release (negative), and the bytes alive after it that were allocated since the start."""

    num_bytes: int
    live_bytes: int
    step: int
    """The index of the step during which it happened."""


@dataclass(frozen=True)
class AllocatorRecord:
    """The allocations and releases of the measured steps, relative to the state before the first one."""

    events: tuple[AllocatorEvent, ...]
    num_steps: int
    num_missed_frees: int
    """The number of blocks whose release in another thread was not recorded, found when their address was allocated again."""
    kept_bytes: tuple[int, ...] = ()
    """For each marked forward (`ForwardMarks`), in order: the bytes that it allocated and that were alive at its end."""

    @property
    def peak_delta_bytes(self) -> int:
        """Return the peak of the bytes alive at once, over all steps."""
        return max((event.live_bytes for event in self.events), default=0)

    @property
    def end_delta_bytes(self) -> int:
        """Return the bytes alive at the end: for a training step, gradients and optimizer state."""
        return self.events[-1].live_bytes if self.events else 0

    def peak_of_step(self, step: int) -> int:
        """Return the peak of the bytes alive at once during `step` (a negative index counts from the last).

        What earlier steps left behind is included, so the last of two training steps gives the steady state.
        """
        index = range(self.num_steps)[step]
        before = [event.live_bytes for event in self.events if event.step < index]
        during = [event.live_bytes for event in self.events if event.step == index]
        return max([before[-1] if before else 0, *during])


class ForwardMarks:
    """Observer of a `reference_step` that marks the forward in the allocator's records, so that `kept_bytes` can be read.

    >>> weight = torch.ones(100, requires_grad=True)
    >>> def step():
    ...     with ForwardMarks().phase("forward"):
    ...         kept = weight.exp().sin()
    ...     kept.sum().backward()
    >>> measure(step, num_steps=1).kept_bytes
    (800,)
    """

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return the context under which to run the phase `name`: a profiler's mark for the forward, none for the others."""
        return torch.profiler.record_function(_FORWARD) if name == "forward" else nullcontext()

    def mark_forward_end(self) -> None:
        """Do nothing: the end of the phase marks the end of the forward."""


def measure(step: Callable[[], Any], num_steps: int = 2) -> AllocatorRecord:
    """Run `step` `num_steps` times and return the CPU allocator's record.

    The result of each call is dropped before the next one begins. Works inside one process of a distributed job. An
    exception of `step` is passed on.

    >>> record = measure(lambda: torch.zeros(1000) + torch.zeros(1000), num_steps=1)
    >>> record.peak_delta_bytes, record.end_delta_bytes
    (12000, 0)
    """
    with memory_session() as profiler:
        for _ in range(num_steps):
            with torch.profiler.record_function(_STEP):
                step()
    return _replay(_trace_events(profiler), num_steps)


def peak_on_gpu(step: Callable[[], Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the peak in bytes of one call of `step`, which trains `module`, by the counters of the CUDA caching allocator.

    It is the peak of parameters, buffers, gradients, optimizer state and what the step makes, in whole blocks of the allocator.
    What else is on the GPU at the end, such as the batch and the workspaces of libraries, does not count. The first step of a
    process makes those workspaces, and optimizer state: a later one gives the steady state. Resets CUDA's peak counter.
    """
    torch.cuda.reset_peak_memory_stats()
    step()
    params = list(module.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    held_bytes = _bytes_in_blocks([*params, *grads, *module.buffers(), *states_of(optimizer)])
    return torch.cuda.max_memory_allocated() - (torch.cuda.memory_allocated() - held_bytes)


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _bytes_in_blocks(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors take on a GPU, in whole blocks of the caching allocator."""
    storages = storages_of(tensor for tensor in tensors if tensor.is_cuda)
    return sum(-(-storage.nbytes() // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for storage in storages)


def memory_session() -> torch.profiler.profile:
    """Return a session of torch's profiler that records the CPU allocator and prints nothing to standard error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def static_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, each storage once, however many views it has.

    >>> static_bytes(nn.Linear(3, 5))
    80
    """
    return storage_bytes([*module.parameters(), *module.buffers()])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of `tensors`; a `DTensor` counts with its local part."""
    return sum(storage.nbytes() for storage in storages_of(tensors))


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of `tensors`, of a `DTensor` that of its local part."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[id(storage)] = storage
    return list(storages.values())


def _trace_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf8"))["traceEvents"]
    return [event for event in events if event.get("name") in ("[memory]", _STEP, _FORWARD)]


def _replay(trace: list[dict[str, Any]], num_steps: int) -> AllocatorRecord:
    """Return the record that the trace amounts to, in order of time.

    An address that is allocated twice was released in between without a record, and counts as released.
    """
    starts = sorted(event["ts"] for event in trace if event["name"] == _STEP and event.get("ph") == "X")
    records = [event for event in trace if event["name"] == "[memory]" and event["args"].get("Device Type") == 0]
    records.sort(key=lambda event: (event["ts"], event["args"].get("Ev Idx", 0)))
    blocks: dict[int, tuple[int, float]] = {}
    forwards = _Forwards(trace, blocks)
    events: list[AllocatorEvent] = []
    live = num_missed = step = 0
    for record in records:
        num_bytes, address, time = int(record["args"]["Bytes"]), record["args"]["Addr"], record["ts"]
        forwards.close(time)
        while step + 1 < len(starts) and time >= starts[step + 1]:
            step += 1
        if num_bytes >= 0:
            stale, _ = blocks.pop(address, (0, 0.0))
            num_missed += stale > 0
            live += num_bytes - stale
            blocks[address] = (num_bytes, time)
        elif address in blocks:
            live -= blocks.pop(address)[0]
        events.append(AllocatorEvent(num_bytes, live, step))
    forwards.close(float("inf"))
    return AllocatorRecord(tuple(events), num_steps, num_missed, tuple(forwards.kept_bytes))


class _Forwards:
    """Sums, at the end of each marked forward, the live blocks that it allocated; `blocks` is address → (size, time)."""

    def __init__(self, trace: list[dict[str, Any]], blocks: dict[int, tuple[int, float]]) -> None:
        marks = [event for event in trace if event["name"] == _FORWARD and event.get("ph") == "X"]
        self._open = sorted((event["ts"], event["ts"] + event["dur"]) for event in marks)[::-1]
        self._blocks = blocks
        self.kept_bytes: list[int] = []

    def close(self, now: float) -> None:
        """Sum the live blocks of each forward that ended before `now` and is not summed yet."""
        while self._open and self._open[-1][1] < now:
            start, _ = self._open.pop()
            self.kept_bytes.append(sum(size for size, born in self._blocks.values() if born >= start))
