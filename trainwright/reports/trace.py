"""The simulated step of a profile as trace events, for `chrome://tracing` and Perfetto.

One thread holds the nested spans step › phase › module › … › op, another track the memory after each op, by category.
Times are microseconds with three decimals, and each span ends where the next begins, so that the durations of the ops
add up to the predicted step. Ops that take no time (views) have no span.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..artifacts import MemoryPoint, Profile, UserError
from ..artifacts.record import write_atomically
from .tree import short_op

__all__ = ["trace_events", "write_trace"]

Event = dict[str, Any]
_TRACK = {"pid": 1, "tid": 1}
_CATEGORIES = ("param", "optimizer", "grad", "saved", "other")


def write_trace(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write the step as a file of trace events; see `trace_events`."""
    document = {
        "traceEvents": trace_events(profile),
        "displayTimeUnit": "ms",
        "otherData": {"model": profile.model, "target": profile.target, "step_s": profile.step_s},
    }
    write_atomically(Path(path), json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")


def trace_events(profile: Profile) -> list[Event]:
    """Return the step as trace events: complete events (`X`) that nest, and counters (`C`) of the memory.

    Raises `UserError` where the profile has no times or no timeline.
    """
    points = profile.timeline
    if profile.step_s is None or not points:
        raise UserError("a trace needs predicted times; this profile has none; profile with --hardware")
    edges_ns = [round(1e9 * end_s) for end_s in accumulate((point.time_s for point in points), initial=0.0)]
    spans = sorted(_spans(points, edges_ns), key=lambda span: (span["ts"], -span["dur"]))
    return [*_names(profile), *spans, *_counters(points, edges_ns)]


def _names(profile: Profile) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", **_TRACK, "args": {"name": f"{profile.model} on {profile.target}"}}
    yield {"ph": "M", "name": "thread_name", **_TRACK, "args": {"name": "one step, simulated"}}


def _spans(points: Sequence[MemoryPoint], edges_ns: Sequence[int]) -> Iterator[Event]:
    """Each span begins when its place in the model is entered and ends when another one is."""
    open_spans: list[tuple[str, int]] = []
    for place, point in enumerate(points):
        names = ["step", point.phase, *_modules(point.path)]
        same = _num_common([name for name, _ in open_spans], names)
        yield from _closed(open_spans, same, edges_ns[place])
        open_spans += [(name, edges_ns[place]) for name in names[same:]]
        if edges_ns[place + 1] > edges_ns[place]:
            args = {"module": point.path, "live_bytes": point.live_bytes}
            yield _span(short_op(point.op), "op", edges_ns[place], edges_ns[place + 1], args)
    yield from _closed(open_spans, 0, edges_ns[-1])


def _closed(open_spans: list[tuple[str, int]], keep: int, end_ns: int) -> Iterator[Event]:
    while len(open_spans) > keep:
        name, start_ns = open_spans.pop()
        if end_ns > start_ns:
            kind = ("step", "phase", "module")[min(len(open_spans), 2)]
            yield _span(_last(name), kind, start_ns, end_ns, {"module": name} if kind == "module" else {})


def _modules(path: str) -> list[str]:
    """A module and all that hold it, outermost first; the number of a block stays with what holds the blocks."""
    names: list[str] = []
    for part in path.split(".") if path else []:
        if part.isdigit() and names:
            names[-1] = f"{names[-1]}.{part}"
        else:
            names.append(part)
    return [".".join(names[: level + 1]) for level in range(len(names))]


def _last(name: str) -> str:
    """The last part of a module's path; a block's with the name of what holds the blocks."""
    *above, last = name.split(".")
    return f"{above[-1]}.{last}" if above and last.isdigit() else last


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def _span(name: str, kind: str, start_ns: int, end_ns: int, args: Event) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        **_TRACK,
        "args": args,
    }


def _counters(points: Sequence[MemoryPoint], edges_ns: Sequence[int]) -> Iterator[Event]:
    """What is alive after each op that takes time or changes the memory."""
    before = None
    for point, end_ns in zip(points, edges_ns[1:]):
        sizes = {name: getattr(point, f"{name}_bytes") for name in _CATEGORIES}
        if sizes != before:
            yield {"ph": "C", "name": "memory, bytes", "ts": end_ns / 1000, **_TRACK, "args": sizes}
        before = sizes
