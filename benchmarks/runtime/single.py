"""One process, nothing split: the captured graph as our module runs it, against the user's own eager model.

    OMP_NUM_THREADS=1 python -m benchmarks.runtime.single [SIZE…] [--rounds N] [--keep]

Both take whole steps (forward, backward, fused AdamW) in turn, in one process. Processor seconds are compared too:
where the machine has other work, they are the steadier measure.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from benchmarks.runtime import models, paired
from benchmarks.runtime.stepping import stepper
from benchmarks.solvers import record

BAR = 1.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=["gpt2-256", "llama-256", "vit-256"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--keep", action="store_true", help="write the record")
    arguments = parser.parse_args()
    rows = [row(size, arguments.rounds) for size in arguments.sizes]
    remarks = [f"The bar: a median ratio of at most {BAR}."]
    record.write("runtime-one-process", {"Ours over eager": rows}, remarks, keep=arguments.keep)


def row(size: str, num_rounds: int) -> dict[str, Any]:
    model, batch = models.build(size)
    plan = tw.plan(*models.build(size, "meta"), hardware="cpu:1")
    steps = {"ours": stepper(tw.parallelize(models.build(size)[0], plan), batch), "eager": stepper(model, batch)}
    dist.destroy_process_group()
    wall, processor = paired.interleave(steps, num_rounds)
    found, busy = paired.ratio(wall["ours"], wall["eager"]), paired.ratio(processor["ours"], processor["eager"])
    return {
        "model": size,
        "ours ms": 1e3 * statistics.median(wall["ours"]),
        "eager ms": 1e3 * statistics.median(wall["eager"]),
        "ratio": found.median,
        "low": found.low,
        "high": found.high,
        "processor": busy.median,
        "processor low": busy.low,
        "processor high": busy.high,
        "met": "yes" if found.median <= BAR else "no",
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
