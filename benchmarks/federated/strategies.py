"""Simulated seconds and bytes to a target accuracy, 100 clients with stragglers: `python -m benchmarks.federated.strategies`.

Also whether predicted times beat measured ones in the first aggregations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.federated import peers, world
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright import federated
from trainwright.federated import Server, SimulatedClient, VectorisedTraining, fedfix_interval_s, simulate

TARGETS = (0.80, 0.88)
MAX_S = 400.0
KNOWN = ((True, math.inf, "predicted"), (True, 20.0, "predicted, trust 20"), (False, 0.0, "measured"))
SETTINGS: dict[str, Any] = {"alpha": 0.3, "lr": 0.1, "num_steps": 10, "batch_size": 16}


class FedAsyncServer(Server):
    """FedAsync (Xie et al. 2019): θ ← (1 - α_s) θ + α_s θ_i, with α_s = 0.6 (1 + staleness)^-½."""

    def send(self, client: str, now_s: float = 0.0) -> Any:
        self.given = {**getattr(self, "given", {}), client: self.arrays}
        return super().send(client, now_s)

    def receive(self, delta: Any, version: int, client: str, now_s: float = 0.0) -> Any:
        alpha = 0.6 * (1 + self.version - version) ** -0.5
        moved = {name: alpha * (self.given[client][name] + value - self.arrays[name]) for name, value in delta.items()}
        return super().receive(moved, version, client, now_s)


class Proximal(federated.Plain):
    """FedProx's gradient, as Flower's strategy of that name asks clients for: plus μ (x - x^t)."""

    def begin(self, params: Any, state: Any, config: Any) -> Any:
        return super().begin(params, state, {**config, "proximal-mu": 0.1})


def run(
    rule: federated.Rule, *, predicted: bool = True, method: Any = None, server_of: Callable[..., Server] = Server,
    max_s: float = MAX_S, targets: Sequence[float] = TARGETS, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    model = world.build()
    works = world.works(100, model, method=method, **SETTINGS)
    clients = world.federation(works, predicted)
    begun, path = time.process_time(), []
    last_s = [-math.inf]

    def look(server: Server, now_s: float) -> bool:
        if now_s - last_s[0] < 0.25:
            return False
        last_s[0] = now_s
        found = world.accuracy(model, server.arrays)
        traffic = server.traffic
        path.append((now_s, found, traffic.bytes_down + traffic.bytes_up))
        return found >= targets[-1]

    server = server_of(federated.model_arrays(model), rule, **options)
    together = VectorisedTraining(works) if method is None else None
    done = simulate(server, clients, max_s=max_s, callback=look, together=together)
    reached = {target: next((each for each in path if each[1] >= target), None) for target in targets}
    row: dict[str, Any] = {}
    for target, each in reached.items():
        row[f"seconds to {target:.0%}"] = each[0] if each else math.nan
        row[f"MB to {target:.0%}"] = each[2] / 1e6 if each else math.nan
    return row | {
        "best accuracy": max(each[1] for each in path), "aggregations": server.version, "pieces of work": done.num_updates,
        "CPU s": time.process_time() - begun,
    }  # fmt: skip


def compare() -> list[dict[str, Any]]:
    clients = world.federation(world.works(100, world.build(), **SETTINGS))
    times_s = {name: client.predicted_s or 1.0 for name, client in clients.items()}
    half = fedfix_interval_s(times_s)
    kinds: dict[str, dict[str, Any]] = {
        "FedAvg, all": {"rule": federated.FedAvg()},
        "FedAvg, a tenth a round": {"rule": federated.FedAvg(0.1)},
        "FedProx (μ 0.1), a tenth a round": {"rule": federated.FedAvg(0.1), "method": Proximal()},
        "FedSpeed, a tenth a round": {
            "rule": federated.FedSpeedAverage(0.1), "method": federated.FedSpeed(penalty=1.0, radius=0.05),
        },
        "FedAsync": {"rule": federated.AsyncFedAvg(weighted=False), "server_of": FedAsyncServer},
        "asynchronous FedAvg, η_g 0.2": {"rule": federated.AsyncFedAvg(), "server_lr": 0.2},
        "FedBuff(10), paper's weights": {"rule": federated.FedBuff(10, weighted=False)},
        "FedBuff(10)": {"rule": federated.FedBuff(10)},
        "FedFix (Δt from predicted times: half finish)": {"rule": federated.FedFix()},
        f"FedFix({half / 2:.2g} s)": {"rule": federated.FedFix(half / 2)},
        **peers.kinds(100, 10),
    }  # fmt: skip
    rows = []
    for name, settings in kinds.items():
        max_s = MAX_S if settings["rule"].is_synchronous else MAX_S / 4
        rows.append({"strategy": name, **run(max_s=max_s, **settings)})
        print(rows[-1], flush=True)
    return rows


def first_rounds() -> list[dict[str, Any]]:
    """How far the weights given so far are from the importances, in sum of differences of shares, after so many aggregations."""
    rows = []
    for rule in (federated.FedFix(0.7), federated.AsyncFedAvg(), federated.FedBuff(10)):  # of 30 clients
        for predicted, trust, name in (
            (True, math.inf, "predicted"),
            (True, 20.0, "predicted, trust 20"),
            (False, 0.0, "measured"),
        ):
            row: dict[str, Any] = {"rule": str(rule), "times": name}
            for count in (10, 30, 100, 300):
                row[f"after {count}"] = float(np.mean([off(rule, predicted, trust, count, seed) for seed in range(3)]))
            rows.append(row)
            print(row, flush=True)
    return rows


def off(rule: federated.Rule, predicted: bool, trust: float, num_aggregations: int, seed: int) -> float:
    """Each client adds one to its own entry of a vector: what is there is the weight it was given."""
    speeds = federated.Speeds.of_federation(30, spread=0.5, stragglers=0.1, slower=10.0, sigma=0.3, seed=seed)
    unit = np.eye(30)
    clients = {
        f"c{k}": SimulatedClient(
            lambda state, arrays, config, k=k: ({"x": unit[k]}, state),
            speed,
            predicted_s=speed.mean_s if predicted else None,
        )
        for k, speed in enumerate(speeds)
    }
    server = Server({"x": np.zeros(30)}, rule, trust=trust)
    simulate(server, clients, max_aggregations=num_aggregations)
    given = server.arrays["x"]
    return float(np.abs(given / num_aggregations - 1 / 30).sum())


def main() -> None:
    torch.set_num_threads(1)
    write(
        "federated-strategies",
        {
            "100 clients, Dirichlet 0.3, a tenth 10 × slower: simulated seconds and megabytes to a test accuracy": compare(),
            "weights given in all, against importances: Σ |Σ_n ω_i(n)/N - p_i|": first_rounds(),
        },
        [
            CPU_SECONDS,
            "Digits, 2,410 parameters, 10 local steps of SGD, lr 0.1, batches of 16; seconds are the simulated clock's: "
            "a client's mean is log-normal (0.5), its pieces again (0.3). A dash: not within 400 s "
            "(in rounds) or 100 s (the others).",
            "FedProx is Flower's: FedAvg's server, μ (x - x^t) at the clients. FedAsync as its paper has it, written here. appfl's "
            "aggregators are those of its release 1.12, driven by the same clock.",
        ],
        packages=("scikit-learn",),
    )  # fmt: skip


if __name__ == "__main__":
    main()
