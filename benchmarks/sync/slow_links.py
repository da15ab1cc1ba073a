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
from trainwright.sync import Network

ROOT = Path(__file__).parents[2]
REMARKS = (
    "reached: a held-out loss of 0.25 (at the mean of all parameters, looked at every 10 steps) within 400 steps; one seed",
    "seconds: of the steps on rank 0, what the looks took left out; the machine was shared with other work",
    "KiB sent by all: counted where torch.distributed is called",
    "calls alone: what methods ask for, by itself, of so many bytes a part; seconds of the slowest rank, a median of 5. The link: "
    "latency of those of 8 bytes, bytes on the wire as the interface counted them, tbf's own rate and burst; nothing is fitted to "
    "what takes longer",
    "one exchange: a step of so many parameters in fp32, ten times as many on a link ten times as fast, 16 times as many where "
    "they are compressed; seconds of the slowest rank, a median of 6. Link s: by the record's closed form on that link. Simulated "
    "s: as many simulated workers on it. Computing s: processor seconds of the stepping thread in other steps, times ranks over "
    "cores, which no link hides. Off: the sum of link and computing over what was measured, less 1",
)


def run(num_ranks: int, mbit: float, module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module on ranks that are joined by links of `mbit`, and return rank 0's rows."""
    with Namespaces(num_ranks, mbit) as spaces:
        ranks = []
        for index in range(num_ranks):
            numbers = {"RANK": index, "WORLD_SIZE": num_ranks, "LOCAL_RANK": index, "MASTER_PORT": 29400}
            environment = os.environ | {name: str(value) for name, value in numbers.items()}
            environment |= {
                "MASTER_ADDR": spaces.address(0),
                "OWN_ADDR": spaces.address(index),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            command = [*spaces.command(index), sys.executable, "-m", f"benchmarks.sync.{module}", *arguments]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        texts = [rank.communicate(timeout=1500)[0] for rank in ranks]
    line = next(line for line in texts[0].splitlines() if line.startswith("ROWS "))
    return json.loads(line.removeprefix("ROWS "))  # type: ignore[no-any-return]


def link(rows: list[dict[str, Any]], mbit: float, num_ranks: int) -> tuple[Network, list[dict[str, Any]]]:
    """The link by itself: latency of the smallest messages, bytes that the interface counted; and how it fits what took longer."""
    n, least, most = num_ranks, min(row["bytes"] for row in rows), max(row["bytes"] for row in rows)
    rounds = {"broadcast": math.ceil(math.log2(n)), "message and answer": 2}
    late = statistics.median(row["seconds"] / rounds.get(row["what"], 1) for row in rows if row["bytes"] == least)
    wire = next(
        row["sent by the busiest"] / (n - 1) / most
        for row in rows
        if (row["what"], row["bytes"]) == ("all_gather", most)
    )
    network = Network(late, mbit * 1e6 / 8, wire=wire, burst_bytes=BURST_BYTES)
    return network, [{**row, "predicted s": _predicted_s(network, row["what"], row["bytes"], n)} for row in rows]


def _predicted_s(network: Network, what: str, num_bytes: int, n: int) -> float:
    if what == "message and answer":
        return network.message_s(num_bytes) + network.latency_s
    if what == "neighbours":
        return network.message_s(num_bytes * min(2, n - 1))
    return network.collective_s([(what, num_bytes)], tuple(range(n)))


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
            network, calls = link(run(number, float(rate), "transport"), float(rate), number)
            known = {name: getattr(network, name) for name in ("latency_s", "bytes_per_s", "wire", "burst_bytes")}
            tables[f"{title}, the link"] = [known]
            tables[f"{title}, calls alone"] = calls
            rows = run(number, float(rate), "worker", "rounds", json.dumps(known))
            tables[f"{title}, one exchange"] = rows
            print(title, known, *calls, *rows, sep="\n", flush=True)
    usual = f"sync-slow-links{'' if only == 'digits,rounds' else '-' + only}"
    write(into or usual, tables, REMARKS, packages=("scikit-learn",))


if __name__ == "__main__":
    typer.run(main)
