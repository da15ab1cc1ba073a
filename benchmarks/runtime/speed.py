"""Our plans against what an expert writes by hand, on the same two processes, step by step in turn.

    python -m benchmarks.runtime.speed [SIZE…] [--rounds N] [--sent] [--keep]

For every size: our `ddp`, `fsdp` and `megatron` plans against `DistributedDataParallel`, `fully_shard` and
`parallelize_module` on the same maths, and the `joint` plan against the fastest of them. All modules live in the same
two gloo processes; every round each of them takes one whole step (forward, backward, fused AdamW) and reads its loss: ours the
whole batch's once the backward is done (`late_loss`, as `train` does), torch's wrappers the rank's own.

Our ranks exchange through memory that they share, theirs over gloo; `--sent`: ours over gloo as well, as between machines.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel

import trainwright as tw
from benchmarks.runtime import baselines, models, paired
from benchmarks.runtime.stepping import stepper
from benchmarks.solvers import record
from trainwright.launch import run_processes
from trainwright.launch.shared_memory import SWITCH

PAIRS = {"ddp": "DistributedDataParallel", "fsdp": "fully_shard, kept", "megatron": "parallelize_module"}
BAR = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=["gpt2-256", "llama-256", "vit-256"])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", nargs="*", default=list(PAIRS))
    parser.add_argument("--hardware", default="cpu:2")
    parser.add_argument("--sent", action="store_true", help="send what ranks of one machine would share")
    parser.add_argument("--keep", action="store_true", help="write the record")
    arguments = parser.parse_args()
    if arguments.sent:
        os.environ[SWITCH] = "0"
    rows = [row for size in arguments.sizes for row in rows_of(size, arguments)]
    remarks = [
        f"The bar: a median ratio of at most {BAR}; `joint`: 1.0.",
        "GPT-2's activation, which it spells out in eight ops, runs as one in ours and as it stands in theirs.",
        "Ours read the whole batch's loss after the backward (`late_loss`), theirs the rank's own.",
        "All over gloo." if arguments.sent else "Ours exchange through memory that the ranks share, theirs over gloo.",
    ]
    name = "runtime-two-processes-sent" if arguments.sent else "runtime-two-processes"
    record.write(name, {"Ours over theirs": rows}, remarks, keep=arguments.keep)


def rows_of(size: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, batch = models.build(size, "meta")
    names = [name for name in arguments.only if name != "megatron" or size.startswith("llama")]
    plans = {
        solver: tw.plan(model, batch, hardware=arguments.hardware, mesh=(2,), solver=solver)
        for solver in (*names, "joint")
    }
    payload = {
        "size": size,
        "plans": {name: plan.to_json() for name, plan in plans.items()},
        "num_rounds": arguments.rounds,
    }
    times, busy = run_processes("benchmarks.runtime.speed:contest", payload, 2)[0]
    best = min((PAIRS[name] for name in names), key=lambda name: statistics.median(times[name]))
    pairs = [(name, PAIRS[name]) for name in names] + [("joint", best)]
    return [row(size, ours, theirs, times, busy) for ours, theirs in pairs]


def row(size: str, ours: str, theirs: str, times: paired.Times, busy: paired.Times) -> dict[str, Any]:
    found = paired.columns(times, busy, ours, theirs)
    return {
        "model": size,
        "ours": ours,
        "theirs": theirs,
        "ours ms": 1e3 * statistics.median(times[ours]),
        "theirs ms": 1e3 * statistics.median(times[theirs]),
        **found,
        "met": "yes" if found["ratio"] <= (1.0 if ours == "joint" else BAR) else "no",
    }


def contest(size: str, plans: dict[str, str], num_rounds: int) -> tuple[paired.Times, paired.Times]:
    """Run on every rank: all contenders take their steps in turn."""
    steps: dict[str, Callable[[], object]] = {}
    for name, text in plans.items():
        model, batch = models.build(size)
        plan = tw.Plan.parse(text)
        module = tw.parallelize(model, plan)
        steps[name] = stepper(module, plan.shard_batch(batch), module.late_loss)
        if name in PAIRS:
            steps[PAIRS[name]] = theirs(size, name)
    return paired.interleave(steps, num_rounds)


def theirs(size: str, name: str) -> Callable[[], object]:
    model, batch = models.build(size)
    if name == "megatron":
        return stepper(baselines.megatron(model), batch, loss_parallel)
    own = models.part(batch, dist.get_rank(), dist.get_world_size())
    return stepper(baselines.ddp(model) if name == "ddp" else baselines.fsdp(model, False), own)


if __name__ == "__main__":
    main()
