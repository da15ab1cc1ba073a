"""Sync methods over a real slow network: ranks in network namespaces, links limited by `tc tbf`. Needs root.

python -m benchmarks.sync.slow_links [--rates 10,100,1000] [--ranks 4] [--into sync-slow-links]     writes benchmarks/results
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.solvers.record import write
from benchmarks.sync.namespaces import BURST_BYTES, Namespaces

ROOT = Path(__file__).parents[2]
REMARKS = (
    "reached: a held-out loss of 0.25 (at the mean of all parameters, looked at every 10 steps) within 400 steps; one seed",
    "seconds: of the steps on rank 0, what the looks took left out; the machine was shared with other work",
    "KiB sent by all: counted where torch.distributed is called",
    "predicted s, measured s: of one exchange of 65,792 parameters in fp32 with nothing to compute; median of 6, the slowest "
    "rank's. Predicted by a Network that `transport` calibrates in a run of its own: messages and collectives alone, of 8 "
    "to 524,288 bytes; the table of the link says what it found. Simulated s: the same exchange by as many simulated workers on "
    "that network",
)


def run(num_ranks: int, mbit: float, module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module on ranks that are joined by links of `mbit`, and return rank 0's rows."""
    with Namespaces(num_ranks, mbit) as spaces:
        ranks = []
        for index in range(num_ranks):
            numbers = {"RANK": index, "WORLD_SIZE": num_ranks, "LOCAL_RANK": index, "MASTER_PORT": 29400}
            environment = os.environ | {name: str(value) for name, value in numbers.items()}
            environment |= {"MASTER_ADDR": spaces.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            command = [*spaces.command(index), sys.executable, "-m", f"benchmarks.sync.{module}", *arguments]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        texts = [rank.communicate(timeout=1500)[0] for rank in ranks]
    line = next(line for line in texts[0].splitlines() if line.startswith("ROWS "))
    return json.loads(line.removeprefix("ROWS "))  # type: ignore[no-any-return]


def link(rows: list[dict[str, Any]], mbit: float, num_ranks: int) -> dict[str, Any]:
    """Fit a link to what `transport` measured: latency from the smallest size, factors from the two largest."""
    bytes_per_s, n, deep = mbit * 1e6 / 8, num_ranks, math.ceil(math.log2(num_ranks))
    steps = {"all_to_all": n - 1, "all_gather": n - 1, "broadcast": deep, "neighbours": 1, "message and answer": 2}
    sent = {"all_to_all": n - 1, "all_gather": n - 1, "broadcast": deep * (deep + 1) / 2, "neighbours": 2}
    least, most = min(row["bytes"] for row in rows), max(row["bytes"] for row in rows)
    late = statistics.median(row["seconds"] / steps[row["what"]] for row in rows if row["bytes"] == least)
    wire = next(
        row["sent by the busiest"] / (n - 1) / most
        for row in rows
        if (row["what"], row["bytes"]) == ("all_gather", most)
    )
    found: dict[str, Any] = {"latency_s": late, "bytes_per_s": bytes_per_s, "wire": wire, "burst_bytes": BURST_BYTES}
    for what in steps:
        factors = [
            ((row["seconds"] - steps[what] * late) * bytes_per_s + BURST_BYTES)
            / (row["bytes"] * sent.get(what, 1) * wire)
            for row in rows
            if row["what"] == what and row["bytes"] > 2 * BURST_BYTES
        ]
        found[NAMES.get(what, what)] = statistics.mean(factors)
    return found


NAMES = {"neighbours": "exchange", "message and answer": "send"}


def main(
    rates: Annotated[str, typer.Option(metavar="N,N", help="Megabits a second of each worker's link.")] = "10,100,1000",
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Numbers of workers.")] = "4",
    into: Annotated[str, typer.Option(metavar="NAME", help="The record's name.")] = "",
    only: Annotated[str, typer.Option(metavar="WHAT", help="digits, rounds, or both.")] = "digits,rounds",
) -> None:
    """Measure on links of each rate, and write the tables."""
    tables = {}
    for rate, number in itertools.product(rates.split(","), map(int, ranks.split(","))):
        title = f"{rate} Mbit/s, {number} workers"
        if "digits" in only:
            tables[f"{title}, digits"] = run(number, float(rate), "worker", "digits")
        if "rounds" in only:
            found = link(run(number, float(rate), "transport"), float(rate), number)
            tables[f"{title}, the link"] = [found]
            rows = run(number, float(rate), "worker", "rounds", json.dumps(found))
            tables[f"{title}, one exchange"] = rows
            print(title, found, *rows, sep="\n", flush=True)
    usual = f"sync-slow-links{'' if only == 'digits,rounds' else '-' + only}"
    write(into or usual, tables, REMARKS, packages=("scikit-learn",))


if __name__ == "__main__":
    typer.run(main)
