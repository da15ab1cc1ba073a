"""Sync methods over a real slow network: ranks in network namespaces, links limited by `tc tbf`. Needs root.

python -m benchmarks.sync.slow_links [--rates 10,100,1000] [--ranks 4]      writes benchmarks/results/sync-slow-links.{md,json}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.solvers.record import write
from benchmarks.sync.namespaces import Namespaces

ROOT = Path(__file__).parents[2]
REMARKS = (
    "reached: a held-out loss of 0.25 (at the mean of all parameters, looked at every 10 steps) within 400 steps; one seed",
    "seconds: of the steps on rank 0, what the looks took left out; the machine was shared with other work",
    "KiB sent by all: counted where torch.distributed is called",
    "predicted s, measured s: of one exchange of 65,792 parameters in fp32 with nothing to compute; median of 4, the slowest "
    "rank's; the price knows no headers of TCP, no latency, and tbf lets a burst of 16 kB through at once",
)


def run(num_ranks: int, mbit: float, what: str) -> list[dict[str, Any]]:
    """Run `worker` on ranks that are joined by links of `mbit`, and return rank 0's rows."""
    with Namespaces(num_ranks, mbit) as spaces:
        ranks = []
        for index in range(num_ranks):
            numbers = {"RANK": index, "WORLD_SIZE": num_ranks, "LOCAL_RANK": index, "MASTER_PORT": 29400}
            environment = os.environ | {name: str(value) for name, value in numbers.items()}
            environment |= {"MASTER_ADDR": spaces.address(0), "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)}
            command = [*spaces.command(index), sys.executable, "-m", "benchmarks.sync.worker", str(mbit), what]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        texts = [rank.communicate(timeout=1500)[0] for rank in ranks]
    line = next(line for line in texts[0].splitlines() if line.startswith("ROWS "))
    return json.loads(line.removeprefix("ROWS "))  # type: ignore[no-any-return]


def main(
    rates: Annotated[str, typer.Option(metavar="N,N", help="Megabits a second of each worker's link.")] = "10,100,1000",
    ranks: Annotated[int, typer.Option(metavar="N", min=2)] = 4,
) -> None:
    """Measure on links of each rate, and write the tables."""
    tables = {}
    for rate in rates.split(","):
        tables[f"{rate} Mbit/s, {ranks} workers, digits"] = run(ranks, float(rate), "digits")
        if float(rate) <= 100:  # faster links are not what the time goes into
            tables[f"{rate} Mbit/s, {ranks} workers, one exchange"] = run(ranks, float(rate), "rounds")
    write("sync-slow-links", tables, REMARKS, packages=("scikit-learn",))


if __name__ == "__main__":
    typer.run(main)
