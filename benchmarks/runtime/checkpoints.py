"""How long a training step is held up by saving, synchronously and in the background, and what memory that takes.

    python -m benchmarks.runtime.checkpoints [--rounds 5] [--no-keep]

Two ranks of this machine, a GPT-2 of some 4 million weights sharded by a plan, AdamW, saved to a local disk. A round is some
steps without saving, then as many after a save of either kind, by turns. *held*: until `save` returns, as a ratio to the plain
step. *slower after*: what the following steps take beyond plain ones until all is on the disk, in steps: there the writing
thread and the ranks share the cores. *memory*: the largest that the allocator recorded beyond the training itself, as a ratio to
the bytes that the rank saves.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from benchmarks.solvers import record
from trainwright.artifacts import Plan
from trainwright.launch import run_processes
from trainwright.profiler.kernels.allocator import measure
from trainwright.runtime import Checkpointer, train_step

OPTIONS: dict[str, Any] = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 4096, "batch_size": 4, "seq_len": 64}
STEPS_AFTER = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    chosen = parser.parse_args()
    model, batch = tw.zoo.build("gpt2", **OPTIONS)
    plan = tw.plan(model, batch, hardware="cpu:2", solver="fsdp")
    payload = {"plan": plan.to_json(), "rounds": chosen.rounds}
    found = run_processes("benchmarks.runtime.checkpoints:rank_of", payload, 2, timeout_s=900)[0]
    record.write(
        "runtime-checkpoints",
        {"Ratios to the plain step": found["rows"]},
        (
            f"plain step: {found['step_s']:.3g} s; a rank saves {found['saved_bytes'] / 2**20:.1f} MiB; "
            f"medians of {chosen.rounds} rounds",
            "each file is synchronised to the disk before the checkpoint counts; ratios of one run, two ranks sharing the cores",
            "the copy is not in a plan's budget; the first save in the background says so where it goes beyond it",
        ),
        keep=chosen.keep,
    )


def rank_of(plan: str, rounds: int) -> dict[str, Any]:
    """Measure on this rank of two."""
    parsed = Plan.parse(plan)
    model, batch = tw.zoo.build("gpt2", device="cpu", **OPTIONS)
    module = tw.parallelize(model, parsed, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    part = parsed.shard_batch(batch)

    def step() -> float:
        began = time.perf_counter()
        train_step(module, optimizer, part)
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        shared: list[Any] = [folder]
        dist.broadcast_object_list(shared, 0)
        kinds = {False: "synchronous", True: "in the background"}
        savers = {
            k: Checkpointer(Path(shared[0]) / name, module, optimizer, asynchronous=k) for k, name in kinds.items()
        }
        for _ in range(2):
            step()
        plain: list[float] = []
        taken: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for number in range(rounds):
            for kind, saver in savers.items():
                plain += [step() for _ in range(STEPS_AFTER)]
                taken[kind].append(_saved(saver, number, step))
        step_s = statistics.median(plain)
        rows = [_row(kinds[kind], taken[kind], step_s, *_memory(savers[kind], rounds)) for kind in kinds]
        saved_bytes = rows[0].pop("saved_bytes"), rows[1].pop("saved_bytes")
        dist.barrier()
    return {"rows": rows, "step_s": step_s, "saved_bytes": saved_bytes[0]}


def _saved(saver: Checkpointer, number: int, step: Any) -> tuple[float, float, float]:
    """Seconds that a save holds the run, that the steps after it take, and until it is on the disk."""
    dist.barrier()
    began = time.perf_counter()
    saver.save(number)
    held_s = time.perf_counter() - began
    after_s = sum(step() for _ in range(STEPS_AFTER))
    saver.wait()
    return held_s, after_s, time.perf_counter() - began


def _memory(saver: Checkpointer, number: int) -> tuple[int, int]:
    """The most that a save holds, and the bytes that it saves, on this rank."""
    sizes: list[int] = []

    def save() -> None:
        saver.save(number)
        saver.wait()

    peak = measure(save, num_steps=1).peak_delta_bytes
    folder = saver.newest()
    assert folder is not None
    sizes += [path.stat().st_size for path in folder.glob(f"__{dist.get_rank()}_*")]
    return peak, sum(sizes)


def _row(name: str, taken: list[tuple[float, float, float]], step_s: float, peak: int, saved: int) -> dict[str, Any]:
    held, after, whole = (statistics.median(values) for values in zip(*taken))
    return {
        "save": name,
        "held / step": held / step_s,
        f"{STEPS_AFTER} steps after / plain": after / (STEPS_AFTER * step_s),
        "slower after, in steps": after / step_s - STEPS_AFTER,
        "on the disk after, in steps": whole / step_s,
        "memory / saved bytes": peak / saved,
        "saved_bytes": saved,
    }


if __name__ == "__main__":
    main()
