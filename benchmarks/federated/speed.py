"""1,000 clients × 100 rounds on one process: `python -m benchmarks.federated.speed`."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from benchmarks.federated import world
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright import federated
from trainwright.federated import Server, VectorisedTraining, simulate

CASES = (
    (federated.FedAvg(), 1000, 100, 32, True),
    (federated.FedAvg(), 100, 10, 32, False),
    (federated.FedAvg(), 100, 10, 32, True),
    (federated.FedFix(0.7), 1000, 100, 32, True),
)
REMARKS = (
    CPU_SECONDS,
    "Every client takes part in each of FedAvg's rounds: 100,000 pieces of work of 5 steps, batches of 16. The bar is 120 "
    "processor seconds (60 s of 2 cores) and 1 GB.",
)


def run(rule: federated.Rule, num_clients: int, num_aggregations: int, hidden: int, together: bool) -> dict[str, Any]:
    model = world.build(hidden)
    works = world.works(num_clients, model, alpha=3.0, lr=0.1, num_steps=5, batch_size=16)
    clients = world.federation(works)
    server = Server(federated.model_arrays(model), rule)
    begun, wall = time.process_time(), time.monotonic()
    done = simulate(
        server, clients, max_aggregations=num_aggregations, together=VectorisedTraining(works) if together else None
    )
    return {
        "rule": str(rule),
        "clients": num_clients,
        "aggregations": num_aggregations,
        "parameters": sum(value.size for value in server.arrays.values()),
        "at once": "yes" if together else "no",
        "pieces of work": done.num_updates,
        "CPU s": time.process_time() - begun,
        "wall s": time.monotonic() - wall,
        "peak MB of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "accuracy": world.accuracy(model, server.arrays),
    }


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for rule, clients, count, hidden, together in CASES:
        rows.append(run(rule, clients, count, hidden, together))
        write("federated-speed", {"one process, one thread": rows}, REMARKS, packages=("scikit-learn",))


if __name__ == "__main__":
    main()
