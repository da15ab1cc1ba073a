"""Streamed steps at declared rates, against their plans: `python -m benchmarks.streaming.rates DIR [--record]`.

Equal blocks, the forward of each of which takes its product and a sleep of declared length (one that wakes late makes the next one
shorter), trained by MeZO from a disk; a token bucket lets no more bytes a second pass than the table says. The planner is told of a
device whose products take as long as the sleeps and of a disk of those rates. All cells run at the same time, as processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.solvers import record
from trainwright.artifacts import Tier
from trainwright.hardware import resolve
from trainwright.optim import MeZO
from trainwright.streaming import DiskStore, Streamed, plan_stream
from trainwright.tiers import StoreOptions

NUM_BLOCKS, WIDTH = 12, 512
FORWARD_S = 1.0
MIB = 2**20
RATES = ((0.5e6, 0.5e6), (0.25e6, 1e6), (1e6, 0.25e6), (2e6, 2e6))
"""Bytes a second that are read and written; a block is a MiB, two forwards through it take two seconds."""
MEMORY = (8, 14)
"""MiB of the device: in the smaller one nearly all blocks stream."""


class Block(nn.Module):
    """A product that takes its time."""

    sleeps = False
    late_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Block.sleeps:
            began = time.perf_counter()
            time.sleep(max(0.0, FORWARD_S - Block.late_s))
            Block.late_s += time.perf_counter() - began - FORWARD_S
        return self.map(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def cell(folder: Path, read: float, write: float, memory: int, num_steps: int) -> dict[str, Any]:
    """Plan and train one cell; return what a step was predicted to take, and what it took."""
    cluster, batch = resolve("cpu:1"), torch.ones(1, WIDTH)
    rates = {
        "flops_per_s": {"fp32": 2 * WIDTH * WIDTH / FORWARD_S}, "bandwidth_bytes_per_s": 1e15, "launch_s": 0.0,
    }  # fmt: skip
    disk = Tier(write_bytes_per_s=write, read_bytes_per_s=read)
    cluster = cluster.model_copy(
        update={"device": cluster.device.model_copy(update=rates), "offload": {"disk": disk}, "fingerprint": ""}
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    plan = plan_stream(model, batch, loss, cluster, place="disk", memory_bytes=memory * MIB)
    folder.mkdir(parents=True)
    # Several threads wait for the bucket at a time, so that one that wakes late costs no bytes of the rate.
    options = StoreOptions(chunk_bytes=2**18, buffer_bytes=2**23, num_threads=6, read_rate=read, write_rate=write)
    store = DiskStore([folder], options)
    streamed = Streamed(model, MeZO(model.parameters(), lr=1e-3), store, blocks=plan.blocks, in_turns=True)
    Block.sleeps = True
    taken = []
    for _ in range(num_steps + 1):  # the first one has nothing to update
        began = time.perf_counter()
        streamed.step(lambda: loss(model, batch))
        taken.append(time.perf_counter() - began)
    Block.sleeps = False
    store.close()
    shutil.rmtree(folder)
    return {
        "read": read, "write": write, "memory": memory, "blocks": len(plan.blocks), "steps_s": taken[1:],
        **plan.predicted.model_dump(),
    }  # fmt: skip


def cells(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Run all cells at the same time."""
    command = [sys.executable, "-m", "benchmarks.streaming.rates", str(folder), "--steps", str(num_steps), "--cell"]
    asked = [f"{read}:{write}:{memory}" for memory in MEMORY for read, write in RATES]
    begun = [subprocess.Popen([*command, each], stdout=subprocess.PIPE, text=True) for each in asked]
    return [json.loads(each.communicate()[0].splitlines()[-1]) for each in begun]


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "# Streamed steps on a disk of declared rates", "", __doc__ or "",
        f"{NUM_BLOCKS} blocks of 1 MiB, {FORWARD_S:g} s a forward. Medians of {len(found[0]['steps_s'])} steps. *Bound* is the",
        f"longest of compute, reads and writes. The machine's load over five minutes was {os.getloadavg()[1]:.1f} on",
        f"{os.cpu_count()} cores.", "",
        "reads | writes | blocks that stream | bound | predicted | step | step / predicted", "---|---|---|---|---|---|---",
    ]  # fmt: skip
    for each in found:
        step_s, bound_s = statistics.median(each["steps_s"]), max(each["compute_s"], each["read_s"], each["written_s"])
        lines.append(
            f"{each['read'] / 1e6:g} MB/s | {each['write'] / 1e6:g} MB/s | {each['blocks']} | {bound_s:.2f} s | "
            f"{each['step_s']:.2f} s | {step_s:.2f} s | {step_s / each['step_s']:.3f}"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.folder)
    if options.cell:
        read, write, memory = options.cell.split(":")
        place = folder / options.cell.replace(":", "-")
        print(json.dumps(cell(place, float(read), float(write), int(memory), options.steps)))
        return
    found = cells(folder, options.steps)
    record.write_text("streaming-rates", found, table(found), options.record)


if __name__ == "__main__":
    main()
