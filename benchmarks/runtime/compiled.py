"""What `torch.compile` of a parallel module gains: the same plan compiled and not, one process, step by step in turn.

    OMP_NUM_THREADS=1 python -m benchmarks.runtime.compiled [SIZE] [--rounds N] [--backend NAME] [--keep]

Nothing is recomputed in these plans, so that every piece between collectives is compiled; the user's own model, compiled by the
same backend, stands beside them. The first step, which compiles, is told apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from benchmarks.runtime import models, paired
from benchmarks.runtime.stepping import Step, stepper_of
from benchmarks.solvers import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=["gpt2-256"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--keep", action="store_true", help="write the record")
    arguments = parser.parse_args()
    rows = [row for size in arguments.sizes for row in rows_of(size, arguments.backend, arguments.rounds)]
    remarks = ["ratio: of step times within a round, below 1 the first is faster; processor: the same of its seconds"]
    record.write("runtime-compiled", {f"backend {arguments.backend}": rows}, remarks, keep=arguments.keep)


def rows_of(size: str, backend: str, num_rounds: int) -> list[dict[str, Any]]:
    steps = {
        "ours": _ours(size),
        "ours compiled": _ours(size, backend),
        "eager": stepper_of(*models.build(size))[0],
        "eager compiled": _eager_compiled(size, backend),
    }
    first_s = {name: _seconds(step) for name, step in steps.items()}
    wall, processor = paired.interleave(steps, num_rounds)
    pairs = [("ours compiled", "ours"), ("eager compiled", "eager"), ("ours compiled", "eager compiled")]
    return [_row(size, *pair, first_s, wall, processor) for pair in pairs]


def _row(
    size: str, one: str, other: str, first_s: dict[str, float], wall: paired.Times, processor: paired.Times
) -> dict[str, Any]:
    return {
        "model": size,
        "step": one,
        "held against": other,
        "step ms": 1e3 * statistics.median(wall[one]),
        "against ms": 1e3 * statistics.median(wall[other]),
        **paired.columns(wall, processor, one, other),
        "first step s": first_s[one],
    }


def _ours(size: str, backend: str | None = None) -> Step:
    plan = tw.plan(*models.build(size, "meta"), hardware="cpu:1")
    model, batch = models.build(size)
    module = tw.parallelize(model, plan)
    dist.destroy_process_group()
    return stepper_of(module, batch, called=torch.compile(module, backend=_own(backend)) if backend else None)[0]


def _eager_compiled(size: str, backend: str) -> Step:
    model, batch = models.build(size)
    return stepper_of(model, batch, called=torch.compile(model, backend=_own(backend)))[0]


def _own(name: str) -> Callable[..., Any]:
    """The backend as a function of its own: Dynamo shares what it has compiled among models of one class and backend."""
    from torch._dynamo import lookup_backend

    return lambda graph, inputs: lookup_backend(name)(graph, inputs)


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
