"""One rank of a link's calibration: seconds and bytes on the wire of messages and collectives, of some sizes, by themselves."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.launch import process_group, rank, world_size
from trainwright.sync import AllGather, AllToAll, Broadcast, Exchange, Ranks

SIZES, REPEATS = (8, 4096, 65_536, 524_288), 5
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def calls(engine: Ranks, num_bytes: int) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name, on parts or a tensor of so many bytes, as methods ask for it."""
    n, part = world_size(), torch.zeros(max(1, num_bytes // 4))
    around = tuple(sorted({(rank() + 1) % n, (rank() - 1) % n}))

    def pair() -> None:
        if rank() == 0:
            dist.send(part, 1)
            dist.recv(part[:1].clone(), 1)
        if rank() == 1:
            dist.recv(part, 0)
            dist.send(part[:1].clone(), 0)

    return {
        "message and answer": pair,
        "all_to_all": lambda: engine.answer(AllToAll(part.expand(n, -1))),
        "all_gather": lambda: engine.answer(AllGather(part)),
        "broadcast": lambda: engine.answer(Broadcast(part, 0)),
        "neighbours": lambda: engine.answer(Exchange(part, around)),
    }


def measured(call: Callable[[], Any]) -> tuple[float, float]:
    """The seconds of the slowest rank, a median, and the bytes that the interface of the busiest sent, a mean."""
    taken, sent = [], []
    for _ in range(REPEATS + 1):
        dist.barrier()
        time.sleep(0.02)  # the barrier's last packets, and tokens for a whole burst, as after a step's computing
        before, began_s = int(COUNTER.read_text()), time.perf_counter()
        call()
        own = torch.tensor([time.perf_counter() - began_s, 0.0], dtype=torch.float64)
        time.sleep(0.05)
        own[1] = int(COUNTER.read_text()) - before
        dist.all_reduce(own, dist.ReduceOp.MAX)
        taken.append(float(own[0]))
        sent.append(float(own[1]))
    return statistics.median(taken[1:]), statistics.mean(sent[1:])


def main() -> None:
    torch.set_num_threads(1)
    with process_group("cpu"):
        rows, engine = [], Ranks()
        for num_bytes in SIZES:
            for name, call in calls(engine, num_bytes).items():
                seconds, sent = measured(call)
                rows.append({"what": name, "bytes": num_bytes, "seconds": seconds, "sent by the busiest": sent})
        if rank() == 0:
            print("ROWS " + json.dumps(rows), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
