"""FedSpeed's table in small: accuracy with few clients a round and unequal labels: `python -m benchmarks.federated.drift`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.federated import world
from benchmarks.federated.strategies import Proximal
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright import federated
from trainwright.federated import Server, SimulatedClient, VectorisedTraining, simulate

ALPHAS = (0.6, 0.3)
SEEDS = (0, 1, 2)
ROUNDS = 200
LOOKS = (50, 100, 150, 200)
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"rule": federated.FedAvg},
    "FedProx (μ 0.1)": {"rule": federated.FedAvg, "method": Proximal()},
    "FedSpeed (λ 1, ρ 0)": {"rule": federated.FedSpeedAverage, "method": federated.FedSpeed(1.0, radius=0.0)},
    "FedSpeed (λ 1, ρ 0.05)": {"rule": federated.FedSpeedAverage, "method": federated.FedSpeed(1.0, radius=0.05)},
    "FedSpeed (λ 10, ρ 0.1: the paper's)": {"rule": federated.FedSpeedAverage, "method": federated.FedSpeed()},
}  # fmt: skip


def curve(rule: type[federated.FedAvg], alpha: float, seed: int, rounds: int, method: Any = None) -> dict[int, float]:
    """Return the held-out accuracy after some of the rounds: 100 clients, a tenth of them a round."""
    model = world.build()
    works = world.works(
        100, model, alpha=alpha, lr=0.1, num_steps=20, batch_size=10, method=method, split_seed=1 + seed, draw_seed=seed
    )
    found: dict[int, float] = {}

    def look(server: Server, now_s: float) -> None:
        if server.version in LOOKS:
            found[server.version] = world.accuracy(model, server.arrays)

    server = Server(federated.model_arrays(model), rule(0.1, seed=seed))
    clients = {name: SimulatedClient(work, importance=len(work.batches.data[1])) for name, work in works.items()}
    together = VectorisedTraining(works) if method is None else None
    simulate(server, clients, max_aggregations=rounds, callback=look, together=together)
    return found


def rows_for(alpha: float) -> list[dict[str, Any]]:
    rows = []
    for name, settings in METHODS.items():
        begun = time.process_time()
        curves = [curve(alpha=alpha, seed=seed, rounds=ROUNDS, **settings) for seed in SEEDS]
        row: dict[str, Any] = {"method": name}
        for version in LOOKS:
            row[f"{version} rounds"] = float(np.mean([each[version] for each in curves]))
        row["spread of the last"] = statistics.stdev(each[ROUNDS] for each in curves)
        rows.append(row | {"CPU s": time.process_time() - begun})
        print(alpha, rows[-1], flush=True)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    sections: dict[str, list[dict[str, Any]]] = {}
    for alpha in ALPHAS:
        sections[f"Dirichlet {alpha}: held-out accuracy, mean of {len(SEEDS)} seeds"] = rows_for(alpha)
        write(
            "federated-drift",
            sections,
            [
                CPU_SECONDS,
                "Digits, 2,410 parameters, 100 clients of 2 examples and more, a tenth a round, 20 local steps of SGD, lr 0.1, "
                "batches of 10. A seed draws the split, the clients of each round and the batches. The lr is not decayed.",
            ],
            packages=("scikit-learn",),
        )


if __name__ == "__main__":
    main()
