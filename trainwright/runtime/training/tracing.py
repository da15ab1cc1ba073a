"""Records a trace of real steps on every rank, for Perfetto and its like, with compute and collectives on separate rows.

    ops          from torch's profiler, of this process                           row "compute", device kernels on "device"
    phases       the forward, the backward, the optimizer's step, and waits       row "compute", around the ops
    collectives  from their issue until the backend reports their completion      rows "collectives"

A collective beside ops of the backward was hidden by them; one under a "wait" was exposed. Clocks are those of the ranks'
machines. Recording slows the recorded steps, most of all their Python code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...artifacts.record import write_atomically
from ..activity import Activity

__all__ = ["StepTrace"]

Event = dict[str, Any]
_MARK = "trainwright::traced"
_COMPUTE, _DEVICE, _OTHER, _COLLECTIVES = 1, 2, 3, 10
"""Rows, as thread numbers; concurrent collectives take one each, from the last number on."""


class StepTrace:
    """Records a trace of `num_steps` steps of a run, after its first `skip` ones."""

    def __init__(self, activity: Activity, num_steps: int = 3, skip: int = 2) -> None:
        self.activity, self.num_steps, self.skip = activity, num_steps, skip
        self.events: list[Event] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the `with` block, if step `number` of the run (from 0) is one of those to be recorded."""
        if not self.skip <= number < self.skip + self.num_steps:
            yield
            return
        recorder = self.activity.recorder = _Recorder()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            with torch.profiler.profile(activities=kinds) as profiler:
                start_ns = time.time_ns()
                with torch.profiler.record_function(_MARK):
                    yield
                end_ns = time.time_ns()
        finally:
            self.activity.recorder = None
        self.events.append(_span(f"step {number}", "step", _COMPUTE, start_ns, end_ns))
        self.events += recorder.events()
        self.events += _ops(profiler, start_ns)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the traces of all ranks to one file, on rank 0; a collective call."""
        ranks: list[Any] = [self.events]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, self.events)
            if dist.get_rank() > 0:
                return
        start_us = min((event["ts"] for events in ranks for event in events), default=0.0)
        found = [event for rank, events in enumerate(ranks) for event in _of_rank(rank, events, start_us)]
        document = {"traceEvents": found, "displayTimeUnit": "ms"}
        write_atomically(Path(path), json.dumps(document, separators=(",", ":")) + "\n")


class _Recorder:
    """`Recorder` of one step: collects what `Activity` reports, with wall-clock times in nanoseconds."""

    def __init__(self) -> None:
        self.done: list[Event] = []
        self.flights: list[tuple[str, int, int, list[int]]] = []

    def did(self, what: str, is_collective: bool, start_ns: int) -> None:
        """Note an activity that has just ended."""
        name, kind = (f"wait for {what}", "wait") if is_collective else (what.removeprefix("the "), "phase")
        self.done.append(_span(name, kind, _COMPUTE, start_ns, time.time_ns()))

    def issued(self, what: str, num_bytes: int, work: Any) -> None:
        """Note a collective that has just been issued, and the time at which the backend completes it."""
        ends: list[int] = []
        self.flights.append((what, num_bytes, time.time_ns(), ends))
        work.get_future().add_done_callback(lambda _: ends.append(time.time_ns()))

    def events(self) -> list[Event]:
        """Return the events noted, each collective on the first free row."""
        found, free_ns = list(self.done), list[int]()
        for what, num_bytes, start_ns, ends in self.flights:
            end_ns = ends[0] if ends else time.time_ns()
            row = next((place for place, until_ns in enumerate(free_ns) if until_ns <= start_ns), len(free_ns))
            free_ns[row : row + 1] = [end_ns]
            found.append(_span(what, "collective", _COLLECTIVES + row, start_ns, end_ns, {"bytes": num_bytes}))
        return found


def _ops(profiler: torch.profiler.profile, start_ns: int) -> Iterator[Event]:
    """Yield the ops that torch's profiler recorded, in wall-clock time, aligned by a mark whose start is known in both clocks."""
    events = profiler.events()
    mark = next(event for event in events if event.name == _MARK)
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        if event.name == _MARK or end <= begin:
            continue
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        row = _DEVICE if on_device else _COMPUTE if event.thread == mark.thread else _OTHER
        at_ns = (start_ns + 1000 * (edge - mark.time_range.start) for edge in (begin, end))
        yield _span(event.name, "op", row, *(round(edge) for edge in at_ns))


def _span(name: str, kind: str, row: int, start_ns: int, end_ns: int, args: Event | None = None) -> Event:
    span = {"ph": "X", "name": name, "cat": kind, "tid": row, "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {**span, "args": args} if args else span


def _of_rank(rank: int, events: list[Event], start_us: float) -> Iterator[Event]:
    """Yield the events of one rank as a process of the trace, with named rows."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    names = {_COMPUTE: "compute", _DEVICE: "device", _OTHER: "other threads"}
    for row in sorted({event["tid"] for event in events}):
        name = names.get(row, "collectives")
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": row, "args": {"sort_index": row}}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        yield {**event, "pid": rank, "ts": round(event["ts"] - start_us, 3)}
