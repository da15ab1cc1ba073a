"""Flower's own simulation with its own FedAvg, on the work of `speed`: `python -m benchmarks.federated.flower_simulation`.

All virtual clients work in each round, 5 local steps each. A process of its own runs it; its children (Ray's) are counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.federated import world
from benchmarks.solvers.record import write

CASES = ((100, 10), (1000, 2))
OURS = {"alpha": 3.0, "lr": 0.1, "num_steps": 5, "batch_size": 16}
ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def simulated(num_clients: int, num_rounds: int) -> None:
    """Run Flower's simulation in this process."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from trainwright import federated
    from trainwright.federated.flower import array_record, arrays_of

    server, client = ServerApp(), ClientApp()
    held: dict[str, Any] = {}

    def work_of(partition: int) -> federated.LocalTraining:
        if not held:
            held.update(world.works(num_clients, world.build(), **OURS))
        work: federated.LocalTraining = held[f"c{partition}"]
        return work

    @client.train()
    def train(message: Message, context: Context) -> Message:
        work, arrays = work_of(int(context.node_config["partition-id"])), arrays_of(message.content["arrays"])
        delta, _ = work({}, arrays, {})
        model = array_record({name: value + delta[name] for name, value in arrays.items()})
        metrics = MetricRecord({"num-examples": len(work.batches.data[1])})
        return Message(RecordDict({"arrays": model, "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        model = world.build()
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=num_clients)
        start: ArrayRecord = array_record(federated.model_arrays(model))
        result = strategy.start(grid, start, num_rounds=num_rounds)
        print(f"accuracy {world.accuracy(model, arrays_of(result.arrays))}", flush=True)

    run_simulation(server, client, num_clients, backend_config={"client_resources": {"num_cpus": 1}})


def measured(num_clients: int, num_rounds: int) -> dict[str, Any]:
    """Return the time and the memory of a process and of all its descendants."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.federated.flower_simulation", str(num_clients), str(num_rounds)]
    process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    seconds: dict[int, float] = {}
    peak_mb = 0.0
    while process.poll() is None:
        found = descendants(process.pid)
        seconds |= {pid: spent for pid, (spent, _) in found.items()}
        peak_mb = max(peak_mb, sum(mb for _, mb in found.values()))
        time.sleep(0.5)
    written = process.stdout.read() if process.stdout is not None else ""
    spent, pieces = sum(seconds.values()), num_clients * num_rounds
    row = {
        "clients": num_clients, "rounds": num_rounds, "pieces of work": pieces, "CPU s": spent,
        "wall s": time.monotonic() - begun, "CPU ms a piece": 1000 * spent / pieces, "peak MB of all its processes": peak_mb,
        "accuracy": float(written.rpartition("accuracy ")[2].split()[0]) if "accuracy " in written else float("nan"),
    }  # fmt: skip
    print(row, flush=True)
    return row


def descendants(root: int) -> dict[int, tuple[float, float]]:
    """Return processor seconds and proportional resident MB of a process and all below it, by pid."""
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    below = {root}
    while more := {pid for pid, (parent, _) in parents.items() if parent in below} - below:
        below |= more
    return {pid: (parents[pid][1], _resident_mb(pid)) for pid in below if pid in parents}


def _resident_mb(pid: int) -> float:
    """Return the pages of a process, those that it shares with others counted in part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0.0


def main() -> None:
    if len(sys.argv) == 3:
        simulated(int(sys.argv[1]), int(sys.argv[2]))
        return
    rows: list[dict[str, Any]] = []
    for num_clients, num_rounds in CASES:
        rows.append(measured(num_clients, num_rounds))
        write(
            "federated-flower-simulation",
            {"Flower's simulation engine, its own FedAvg, one actor a core": rows},
            [
                "Processor seconds of all processes (Ray's among them), start included; memory with shared pages counted in part. "
                "The same work as `federated-speed`: 2,410 parameters, 5 steps, batches of 16."
            ],
            packages=("flwr", "ray", "scikit-learn"),
        )


if __name__ == "__main__":
    main()
