"""What the kernels of a training step reach here, each measured alone: a table from kernel and sizes to work per second.

Each repetition runs on tensors of its own and keeps what it returns until all have run: in a training step, too, a
kernel finds its arguments where other tensors have passed through the caches since, and leaves what it saves.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .kernel_suite import KernelCall, suite

Clock = Callable[[Callable[[], Any], float], float]
"""(what to run, seconds to spend) → seconds of one run: `measure` has that of several ranks."""

_TURNS, _TURNS_IN_PLACE = 16, 64
"""The most repetitions that have tensors of their own; what changes in place is a model's state, far larger than a layer."""
_TURN_BYTES = 192 << 20
"""The most that those tensors may hold, beyond one repetition's."""
_HELD_BYTES = 32 << 20
"""The most that is kept of what they return: the allocator keeps that much for the next time, and a step's own too."""


def rates(quick: bool, clock: Clock, progress: Callable[[int], None] | None = None) -> list[list[Any]]:
    """Return the rows [kernel, dtype, sizes, work per second] of this process, by one clock.

    `progress` is told, now and then, how many calls have been measured.
    """
    from ..ops.kernels import kernel_of

    rows: list[list[Any]] = []
    budget_s = 0.01 if quick else 0.03
    for call in suite(quick):
        if progress is not None and rows and len(rows) % 100 == 0:
            progress(len(rows))
        begin = time.perf_counter()
        out = call.func(*call.args, **call.kwargs)
        once_s = time.perf_counter() - begin
        kernel = kernel_of(call.func, call.args, dict(call.kwargs), out)
        most = _TURNS_IN_PLACE if kernel.name.endswith("_") else _TURNS
        num_turns = max(2, min(most, _TURN_BYTES // max(_num_bytes(call.args), 1), int(budget_s / max(once_s, 1e-9))))
        num_held = _HELD_BYTES // max(_num_bytes(out), 1)
        del out
        taken_s = clock(_in_turn(call, num_turns, num_held), budget_s) / num_turns
        rows.append([kernel.name, call.dtype, list(kernel.dims), kernel.work / taken_s])
    return rows


def kernel_table(tables: list[list[list[Any]]]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Return the median over several tables of `rates` of each kernel, which also serves one that came up twice."""
    found: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for name, dtype, dims, work_per_s in itertools.chain.from_iterable(tables):
        found.setdefault(f"{name} {dtype}", {}).setdefault(tuple(dims), []).append(work_per_s)
    return {
        key: tuple((*dims, rounded(statistics.median(values))) for dims, values in rows.items())
        for key, rows in found.items()
    }


def rounded(value: float) -> float:
    """Keep four digits: more were never measured."""
    return float(f"{value:.4g}") if math.isfinite(value) else value


def _in_turn(call: KernelCall, num_turns: int, num_held: int) -> Callable[[], None]:
    """The call on tensors that take turns, the last `num_held` results kept until all have run."""
    func, kwargs, every = call.func, call.kwargs, [call.args, *(_copied(call.args) for _ in range(num_turns - 1))]

    def run() -> None:
        held: deque[Any] = deque(maxlen=num_held)
        for args in every:
            held.append(func(*args, **kwargs))

    return run


def _copied(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(item) for item in value)
    return value.clone() if hasattr(value, "clone") else value


def _num_bytes(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(_num_bytes(item) for item in value)
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0
