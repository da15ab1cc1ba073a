"""One device under a memory budget: our plan against checkpointing every block and against `torch.compile`'s own budget.

    OMP_NUM_THREADS=1 trainwright calibrate --nproc 1 -o machine.json
    OMP_NUM_THREADS=1 python -m benchmarks.runtime.budgets [SIZE] --hardware machine.json [--rounds N] [--backend NAME…] [--keep]

For every contender the peak of a steady step is measured, from the allocator's own records; our plan is then made for that many
bytes (where none fits, for the next of 2, 5 and 10 % more, which then counts as missed), its own peak is measured in the
same way, and both take whole steps (forward, backward, fused AdamW) in turn. Checkpointing is `torch.utils.checkpoint` around
every block, as the model's own switch does it. The budgets are `activation_memory_budget` of the min-cut partitioner, 1.0
being its default; the backend decides what runs the two graphs: `aot_eager` the kernels that we run too, `inductor` fused
ones (minutes to compile).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainwright as tw
from benchmarks.runtime import models, paired
from benchmarks.runtime.stepping import stepper_of
from benchmarks.solvers import record
from trainwright.artifacts import Cluster, Plan, Refusal
from trainwright.profiler.kernels.allocator import measure, storage_bytes

BUDGETS = (0.3, 0.5, 0.7, 0.9, 1.0)


@dataclass(frozen=True)
class Contender:
    """A whole training step and its measured peak."""

    step: Callable[[], object]
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", nargs="?", default="gpt2-256")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", nargs="+", default=["aot_eager"], help="one or several, a table each")
    parser.add_argument("--budgets", type=float, nargs="*", default=list(BUDGETS))
    parser.add_argument("--hardware", default="cpu:1", help="a preset, or a file of `trainwright calibrate`")
    parser.add_argument("--keep", action="store_true", help="write the record")
    arguments = parser.parse_args()
    tables = {f"{arguments.size}, backend {name}": rows_of(arguments, name) for name in arguments.backend}
    remarks = [
        "peak: of one steady step, parameters and optimizer state included, from the allocator's records; equal or less is ours",
        "ratio: ours over theirs within a round, its median and the interval of the rounds; processor: the same of its seconds",
        "The bar: no slower at equal peak, a ratio of at most 1.0, where the backend runs the kernels that we run (aot_eager); "
        "inductor's fused ones are held against ours that are not fused.",
    ]
    record.write("runtime-budgets", tables, remarks, keep=arguments.keep)


def rows_of(arguments: argparse.Namespace, backend: str) -> list[dict[str, Any]]:
    size, hardware = arguments.size, arguments.hardware
    torch._dynamo.reset()
    theirs = {"every block checkpointed": checkpointed(size)}
    for budget in arguments.budgets:
        theirs[f"budget {budget:g}"] = partitioned(size, budget, backend)
    ours = {name: planned(size, hardware, found.peak_bytes) for name, found in theirs.items()}
    steps = {f"theirs {name}": found.step for name, found in theirs.items()}
    steps.update({f"ours {name}": found.step for name, found in ours.items()})
    wall, processor = paired.interleave(steps, arguments.rounds)
    return [row(name, theirs[name], ours[name], wall, processor) for name in theirs]


def row(name: str, theirs: Contender, ours: Contender, wall: paired.Times, processor: paired.Times) -> dict[str, Any]:
    found = paired.columns(wall, processor, f"ours {name}", f"theirs {name}")
    return {
        "theirs": name,
        "their peak MiB": theirs.peak_bytes / 2**20,
        "our peak MiB": ours.peak_bytes / 2**20,
        "their ms": 1e3 * statistics.median(wall[f"theirs {name}"]),
        "our ms": 1e3 * statistics.median(wall[f"ours {name}"]),
        **found,
        "met": "yes" if found["ratio"] <= 1.0 and ours.peak_bytes <= theirs.peak_bytes else "no",
    }


def checkpointed(size: str) -> Contender:
    model, batch = models.build(size)
    model.gradient_checkpointing_enable()
    return contender(model.train(), batch)


def partitioned(size: str, budget: float, backend: str) -> Contender:
    """The model compiled under `activation_memory_budget`."""
    import torch._functorch.config as functorch
    from torch._dynamo import lookup_backend

    # A function of its own for each budget: Dynamo shares what it has compiled among models of one class and backend.
    def under_budget(graph: Any, inputs: Any) -> Any:
        with functorch.patch(activation_memory_budget=budget):
            return lookup_backend(backend)(graph, inputs)

    model, batch = models.build(size)
    return contender(model.train(), batch, torch.compile(model, backend=under_budget))


def planned(size: str, hardware: str, peak_bytes: int) -> Contender:
    """Our module within `peak_bytes`, or within as little more as there is a plan for."""
    cluster = hardware if hardware.startswith("cpu") else Cluster.from_json(hardware)
    model, batch = models.build(size)
    found = contender(tw.parallelize(model, _plan(size, cluster, peak_bytes)).train(), batch)
    dist.destroy_process_group()
    return found


def _plan(size: str, cluster: str | Cluster, peak_bytes: int) -> Plan:
    for more in (1.0, 1.02, 1.05, 1.1):
        try:
            return tw.plan(*models.build(size, "meta"), hardware=cluster, memory=int(more * peak_bytes))
        except Refusal as error:
            print(f"within {more:g} of {peak_bytes} bytes: {error}")
    raise RuntimeError(f"no plan for {peak_bytes} bytes, nor for a tenth more")


def contender(module: nn.Module, batch: dict[str, Any], called: Callable[..., Any] | None = None) -> Contender:
    """Return the step of `module` and its peak, once two steps have made the optimizer's state."""
    step, optimizer = stepper_of(module, batch, called=called)
    for _ in range(2):
        step()
    optimizer.zero_grad(set_to_none=True)
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    static = storage_bytes([*module.parameters(), *module.buffers(), *states])
    return Contender(step, static + measure(step, num_steps=1).peak_delta_bytes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
