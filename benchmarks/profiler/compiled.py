"""Predicted against measured memory and time of steps that `torch.compile` has compiled, on this machine's CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.profiler.compiled [NAME:BATCH[:SEQ] ...] [--no-times] [--keep]

Each model of the zoo is profiled with and without `compile=True`, then compiled by inductor in earnest and trained under the
allocator's records. Measured are the peak of the second step after the compilation, what its forward leaves alive, and the
processor seconds of steps, compiled and not in turn; the predicted seconds are told by kernels measured in this run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.profiler import step_time
from benchmarks.profiler.peaks import _forget_tables, _state_of
from benchmarks.solvers import record
from trainwright.artifacts import Cluster
from trainwright.hardware.kernels import kernel_table, rates
from trainwright.hardware.overheads import overheads
from trainwright.ops.kernel_table import KernelTable
from trainwright.profiler import ForwardMarks, measure, profile, reference_step, static_bytes, storage_bytes

DEFAULT = ("gpt2-tiny:16:64", "llama-tiny:16:64", "qwen3-tiny:16:64", "gemma-3-tiny:16:64", "mixtral-tiny:8:64", "bert-tiny:16:64",
           "t5-tiny:16:32", "vit-tiny:16", "resnet-tiny:16", "mamba-2-tiny:8:64")  # fmt: skip
_ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(DEFAULT), help="NAME:BATCH[:SEQ] of the zoo")
    parser.add_argument("--no-times", dest="times", action="store_false", help="compare memory alone")
    parser.add_argument("--keep", action="store_true", help="write the record")
    arguments = parser.parse_args()
    cluster = _calibrated() if arguments.times else None
    memory, times = [], []
    for spec in arguments.models:
        began = time.perf_counter()
        found = rows_of(spec, cluster)
        memory.append(found[0])
        times += found[1:]
        print(spec, found, f"{time.perf_counter() - began:.0f} s", flush=True)
    sections = {"memory": memory} | ({"time": times} if times else {})
    record.write("profiler-compiled", sections, _remarks(memory, times), ["transformers"], keep=arguments.keep)


def rows_of(spec: str, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Return the model's row of memory, and with a cluster that of time."""
    torch.compiler.reset()
    eager = profile(*_built(spec, "meta"), hardware=cluster)
    compiled = profile(*_built(spec, "meta"), hardware=cluster, compile=True)
    plain, fast = _stepper(spec), _stepper(spec, compiled=True)
    _forget_tables()
    fast.step()
    allocator = measure(fast.step)
    peak, saved = (
        fast.static + storage_bytes(_state_of(fast.optimizer)) + allocator.peak_of_step(1),
        allocator.kept_bytes[-1],
    )
    assert compiled.compiled is not None
    rows = [
        {
            "model": spec,
            "graphs": compiled.compiled.num_graphs,
            "kernels": compiled.compiled.num_kernels,
            "peak KiB": peak / 1024,
            "predicted": compiled.peak_bytes / 1024,
            "peak error %": 100 * (compiled.peak_bytes / peak - 1),
            "saved KiB": saved / 1024,
            "saved error %": 100 * (compiled.saved_bytes / saved - 1),
            "eager peak": eager.peak_bytes / 1024,
        }
    ]
    if cluster is not None and eager.step_s and compiled.step_s:
        plain_s, fast_s = _in_turn(plain.step, fast.step)
        rows.append(
            {
                "model": spec,
                "eager ms": 1e3 * plain_s,
                "eager error %": 100 * (eager.step_s / plain_s - 1),
                "compiled ms": 1e3 * fast_s,
                "compiled error %": 100 * (compiled.step_s / fast_s - 1),
                "ratio": fast_s / plain_s,
                "ratio predicted": compiled.step_s / eager.step_s,
            }
        )
    return rows


class _Stepper:
    def __init__(self, step: Callable[[], None], static: int, optimizer: torch.optim.Optimizer) -> None:
        self.step, self.static, self.optimizer = step, static, optimizer


def _stepper(spec: str, compiled: bool = False) -> _Stepper:
    model, batch = _built(spec, "cpu")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=False)
    if compiled:
        model.forward = functools.wraps(model.forward)(torch.compile(model.forward, dynamic=False))

    def step() -> None:
        reference_step(model, optimizer, batch, observer=ForwardMarks())

    return _Stepper(step, static_bytes(model), optimizer)


def _built(spec: str, device: str) -> tuple[Any, Any]:
    return step_time.build(spec, device)


def _in_turn(plain: Callable[[], None], fast: Callable[[], None]) -> tuple[float, float]:
    """Return the median processor seconds of both, each run in turn with the other."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for step, seconds in zip((plain, fast), taken):
            began = time.process_time()
            for _ in range(3):
                step()
            seconds.append((time.process_time() - began) / 3)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _calibrated() -> Cluster:
    table = rates(False, step_time.clock)
    return step_time.calibrated([table], [overheads(KernelTable(kernel_table([table])), step_time.clock)])


def _remarks(memory: list[dict[str, Any]], times: list[dict[str, Any]]) -> list[str]:
    errors = [abs(row["peak error %"]) for row in memory]
    remarks = [
        f"peak: median error {statistics.median(errors):.2f} %, worst {max(errors):.2f} % of {len(errors)} models"
    ]
    errors = [abs(row["saved error %"]) for row in memory]
    remarks.append(f"saved: median error {statistics.median(errors):.2f} %, worst {max(errors):.2f} %")
    if times:
        misses = [abs(row["ratio predicted"] / row["ratio"] - 1) * 100 for row in times]
        remarks.append(
            f"compiled step over eager step: median error of the ratio {statistics.median(misses):.0f} %, worst "
            f"{max(misses):.0f} %; of steps of some milliseconds, the way into a graph is not modelled on a CPU"
        )
    return remarks


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
