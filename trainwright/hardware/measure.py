"""What one of several processes of this machine reaches, measured while the others measure the same beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..launch import emit
from ..launch.cores import num_cores
from ..ops.kernel_table import KernelTable
from .disk import disk_rates
from .host import host_rates
from .kernels import kernel_table, rates
from .overheads import overheads

if TYPE_CHECKING:
    from ..launch.shared_memory import SharedMemory

_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CONV_DTYPES = ("fp64", "fp32", "bf16")
_MIN_REPEATS = 3


def measure(quick: bool) -> dict[str, Any]:
    """Return this rank's rates and its timings of collectives; runs on every rank at once, in the group.

    `matmul` and `conv`: FLOP/s by dtype; `bandwidth`: bytes read and written per second; `launch_s`: one small op;
    `kernels`: rows as `kernels.rates` gives them, `overheads`, `disk`, `host` as they say; `collectives`: rows [kind, bytes as in
    `collectives.seconds`, seconds]; `shares_memory`: whether large ones went through memory, as they will in training.
    """
    import torch.distributed as dist

    from ..launch.shared_memory import shared_memory

    budget_s = 0.06 if quick else 0.6
    emit({"progress": "matrix products"})
    matmul = {dtype: _matmul_rate(name, quick, budget_s) for dtype, name in _DTYPES.items()}
    emit({"progress": "convolutions"})
    conv = {dtype: _conv_rate(_DTYPES[dtype], budget_s) for dtype in _CONV_DTYPES}
    emit({"progress": "memory"})
    bandwidth, launch_s = _bandwidth(budget_s), _launch_s()
    emit({"progress": "kernels"})
    table = rates(quick, _seconds, lambda measured: emit({"progress": f"kernels, {measured} measured"}))
    beyond = overheads(KernelTable(kernel_table([table])), _seconds)
    emit({"progress": "disk"})
    disk = disk_rates(quick)
    emit({"progress": "host"})
    host = host_rates(quick)
    emit({"progress": "collectives"})
    shared = shared_memory(dist.group.WORLD)
    rows = list(_collective_rows(quick, shared))
    return {
        "matmul": matmul,
        "conv": conv,
        "bandwidth": bandwidth,
        "launch_s": launch_s,
        "kernels": table,
        "overheads": beyond,
        "disk": disk,
        "host": host,
        "collectives": rows,
        "shares_memory": shared is not None,
    }


def _matmul_rate(dtype: str, quick: bool, budget_s: float) -> float:
    """The median over sizes, as layers differ: narrow ones reach less than wide ones."""
    import torch

    rates = []
    for size in (128, 256, 512) if quick else (128, 256, 512, 1024):
        left, right = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
        rates.append(2 * size**3 / _seconds(lambda left=left, right=right: left @ right, budget_s))  # type: ignore[misc]
    return statistics.median(rates)


def _conv_rate(dtype: str, budget_s: float) -> float:
    import torch

    kind = getattr(torch, dtype)
    image, weight = torch.randn(2, 64, 28, 28).to(kind), torch.randn(64, 64, 3, 3).to(kind)
    flops = 2 * image.shape[0] * 28 * 28 * weight.numel()
    return flops / _seconds(lambda: torch.nn.functional.conv2d(image, weight, padding=1), budget_s)


def _bandwidth(budget_s: float) -> float:
    """Additions into fresh memory, as the ops of a training step do, within the caches' reach and beyond it.

    The harmonic mean over the sizes: bytes over time, were as much moved in each.
    """
    import torch

    rates = []
    for num_elements in (1 << 18, 1 << 20, 1 << 22):
        left, right = torch.ones(num_elements), torch.ones(num_elements)
        taken_s = _seconds(lambda left=left, right=right: left + right, budget_s)  # type: ignore[misc]
        rates.append(3 * num_elements * left.element_size() / taken_s)
    return statistics.harmonic_mean(rates)


def _launch_s() -> float:
    """An op too small to have a cost of its own, recorded for the backward."""
    import torch

    value = torch.ones(8, requires_grad=True)

    def run() -> None:
        for _ in range(200):
            value + 1.0

    return _seconds(run, 0.05) / 200


def _collective_rows(quick: bool, shared: SharedMemory | None) -> Iterator[tuple[str, int, float]]:
    import torch
    import torch.distributed as dist

    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return
    for exponent in (12, 16, 20, 23) if quick else (10, 12, 14, 16, 18, 20, 22, 24, 25):
        num_elements = (1 << exponent) // 4 // num_ranks * num_ranks
        full = torch.zeros(num_ranks, num_elements // num_ranks)
        for kind, run in _collectives(full, torch.zeros(full.shape[1]), shared).items():
            yield kind, 4 * num_elements, _seconds_together(run, 5 if quick else 15)


def _collectives(full: Any, part: Any, shared: SharedMemory | None) -> dict[str, Callable[[], Any]]:
    """Each kind as a call."""
    import torch
    import torch.distributed as dist

    from ..launch.flat import all_gather_flat, reduce_scatter_flat
    from ..launch.shared_memory import is_shared

    received = torch.empty_like(full)
    given = {
        "all_gather": (part, full, lambda: all_gather_flat(full.view(-1), part)),
        "reduce_scatter": (full, part, lambda: reduce_scatter_flat(part, full.view(-1))),
        "all_reduce": (full, full, lambda: dist.all_reduce(full)),
        "all_to_all": (full, received, lambda: dist.all_to_all_single(received.view(-1), full.view(-1))),
    }
    return {
        kind: partial(_by_memory, shared, kind, tensor, result, send)
        if shared is not None and is_shared(kind, tensor) and shared.takes(tensor)
        else send
        for kind, (tensor, result, send) in given.items()
    }


def _by_memory(shared: SharedMemory, kind: str, tensor: Any, result: Any, send: Callable[[], Any]) -> None:
    work, finish = shared.begin(kind, tensor, lambda *_: send())
    work.wait()
    finish(tensor, result)


def _seconds(run: Callable[[], Any], budget_s: float) -> float:
    """Return the mean time of `run` over the budget, which all ranks begin together.

    It is the processor's time, which other programs on this machine do not lengthen. Where processes outnumber cores it is the
    wall clock's: what counts there is also the time that they spend waiting for one another.
    """
    import torch.distributed as dist

    clock = time.thread_time if dist.get_world_size() <= num_cores() else time.perf_counter
    run()
    dist.barrier()
    begin, num_repeats, taken_s = clock(), 0, 0.0
    while num_repeats < _MIN_REPEATS or taken_s < budget_s:
        run()
        num_repeats += 1
        taken_s = clock() - begin
    return taken_s / num_repeats


def _seconds_together(run: Callable[[], Any], num_repeats: int) -> float:
    """Return the median time of a collective: the same number of repeats on every rank, each begun together."""
    import torch.distributed as dist

    run()
    times = []
    for _ in range(num_repeats):
        dist.barrier()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
