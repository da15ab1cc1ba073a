"""Plans say how long clients take: Δt and the weights before anything was measured: `python -m benchmarks.federated.planned`.

Clients are planned modules on unlike hardware. The clock's truth is not the plan: each client's mean is off from what
its plan predicts by a log-normal factor of its own, and each piece of work again.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import trainwright as tw
from benchmarks.federated import world
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright import federated
from trainwright.federated import LocalTraining, Server, SimulatedClient, Speeds, predicted_work_s, simulate

HARDWARE = ("cpu:1", "1xv100", "1xrtx4090", "1xh100")
NUM_CLIENTS = 20
HIDDEN = 4096
BATCH = 16
SEEDS = tuple(range(10))
LOOKS = (1, 2, 4, 8)
OFF = 0.3
"""The log-normal deviation of a client's mean time from what its plan predicts."""


@functools.cache
def planned(hardware: str) -> tuple[tw.Plan, nn.Module]:
    """Return the plan of the model on some hardware, and the module that runs by it."""
    images, labels = world.digits()
    batch = (images[:BATCH], labels[:BATCH])
    settings: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss()}
    plan = tw.plan(world.build(HIDDEN), batch, hardware=hardware, optimizer="sgd", **settings)
    return plan, tw.parallelize(world.build(HIDDEN), plan, **settings)


def loss_by(plan: tw.Plan) -> Callable[[Any, Any], torch.Tensor]:
    return lambda module, batch: module(*plan.shard_batch(batch)).loss


def federation(seed: int, predicted: bool = True) -> dict[str, SimulatedClient]:
    """Return clients whose plans differ in hardware and whose data differ in size, hence in local steps."""
    images, labels = world.digits()
    parts = federated.dirichlet_split(labels[: world.NUM_TRAIN].numpy(), NUM_CLIENTS, 0.3, seed=seed, min_size=BATCH)
    rng = np.random.default_rng(seed)
    found = {}
    for k, part in enumerate(parts):
        plan, module = planned(HARDWARE[k % len(HARDWARE)])
        num_steps = math.ceil(len(part) / BATCH)  # an epoch
        work = LocalTraining(
            module, (images[part], labels[part]), loss_by(plan), functools.partial(tw.optim.create, "sgd", lr=0.1),
            num_steps=num_steps, batch_size=BATCH, seed=k,
        )  # fmt: skip
        predicted_s = predicted_work_s(plan, num_steps)
        truth = Speeds(predicted_s * float(rng.lognormal(-(OFF**2) / 2, OFF)), sigma=0.3, seed=1000 * seed + k)
        found[f"c{k}"] = SimulatedClient(work, truth, len(part), predicted_s if predicted else None)
    return found


def objective(server: Server) -> float:
    """Return the loss over all training examples, which is Σ p_i f_i."""
    model = world.build(HIDDEN)
    federated.load_arrays(model, server.arrays)
    images, labels = world.digits()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images[: world.NUM_TRAIN]), labels[: world.NUM_TRAIN]))


def run(
    rule: federated.Rule, clients: dict[str, SimulatedClient], looks_s: list[float], *, trust: float, server_lr: float,
    measure_first: bool = False,
) -> list[float]:  # fmt: skip
    """Return the objective at each of the times; measure_first: one round that waits for all comes before the rule."""
    server = Server(federated.model_arrays(world.build(HIDDEN)), federated.FedAvg() if measure_first else rule,
                    trust=trust, server_lr=server_lr)  # fmt: skip
    path = [(0.0, objective(server))]

    def look(server: Server, now_s: float) -> None:
        path.append((now_s, objective(server)))

    start_s, states = 0.0, {}
    if measure_first:
        done = simulate(server, clients, max_aggregations=1, callback=look)
        start_s, states = done.now_s, done.states
        times_s = {name: known.mean_s or 1.0 for name, known in server.clients.known.items()}
        server = Server(server.arrays, rule.settled(times_s), trust=trust, server_lr=server_lr)
    if start_s < looks_s[-1]:
        simulate(server, clients, max_s=looks_s[-1], callback=look, start_s=start_s, states=states)
    return [next(value for now_s, value in reversed(path) if now_s <= look_s) for look_s in looks_s]


def half_s(clients: dict[str, SimulatedClient]) -> float:
    """Return when half of the clients have answered for the first time."""
    return federated.fedfix_interval_s({name: client.takes_s(0) for name, client in clients.items()})


KINDS: dict[str, dict[str, Any]] = {
    "FedAvg": {"rule": federated.FedAvg()},
    "FedFix, Δt and weights by plans": {"rule": federated.FedFix()},
    "FedFix, Δt by plans, weights measured": {"rule": federated.FedFix(), "weights": "measured"},
    "FedFix, Δt when half have answered, weights measured": {"rule": None, "weights": "measured"},
    "FedFix, a round for all to measure, then as measured": {
        "rule": federated.FedFix(), "weights": "measured", "measure_first": True,
    },
    "FedBuff(5), weights by plans": {"rule": federated.FedBuff(5)},
    "FedBuff(5), weights measured": {"rule": federated.FedBuff(5), "weights": "measured"},
    "asynchronous FedAvg, η_g 0.1, weights by plans": {"rule": federated.AsyncFedAvg(), "server_lr": 0.1},
    "asynchronous FedAvg, η_g 0.1, weights measured": {
        "rule": federated.AsyncFedAvg(), "server_lr": 0.1, "weights": "measured",
    },
}  # fmt: skip


def row(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    begun, options = time.process_time(), dict(settings)
    rule, by_measure = options.pop("rule"), options.pop("weights", "predicted") == "measured"
    options = {"trust": 0.0 if by_measure else 20.0, "server_lr": 1.0, **options}
    found = []
    for seed in SEEDS:
        clients = federation(seed)
        unit_s = federated.fedfix_interval_s({key: each.predicted_s or 1.0 for key, each in clients.items()})
        own = rule or federated.FedFix(half_s(clients))
        found.append(run(own, clients, [look * unit_s for look in LOOKS], **options))
    means = np.exp(np.log(found).mean(0))
    return {"strategy": name, **{f"loss at {look}": float(value) for look, value in zip(LOOKS, means)},
            "CPU s": time.process_time() - begun}  # fmt: skip


def plans() -> list[dict[str, Any]]:
    """Return what the plans predict."""
    clients = federation(SEEDS[0])
    times_s = {name: each.predicted_s or 1.0 for name, each in clients.items()}
    rows = []
    for k, hardware in enumerate(HARDWARE):
        own = [time_s for name, time_s in times_s.items() if int(name[1:]) % len(HARDWARE) == k]
        rows.append({"hardware": hardware, "step, ms": planned(hardware)[0].predicted.step_s * 1e3,
                     "shortest work, ms": min(own) * 1e3, "longest work, ms": max(own) * 1e3})  # fmt: skip
    return [*rows, {"hardware": "Δt, in which half finish", "step, ms": math.nan, "shortest work, ms": math.nan,
                    "longest work, ms": federated.fedfix_interval_s(times_s) * 1e3}]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    sections: dict[str, list[dict[str, Any]]] = {"what the plans predict": plans()}
    rows: list[dict[str, Any]] = []
    sections["loss over all clients' examples, at multiples of the predicted Δt; geometric mean of 10 seeds"] = rows
    for name, settings in KINDS.items():
        rows.append(row(name, settings))
        print(rows[-1], flush=True)
    write(
        "federated-planned", sections,
        [CPU_SECONDS, f"Digits, {NUM_CLIENTS} clients, Dirichlet 0.3, an epoch of local steps, SGD with lr 0.1, batches "
         f"of {BATCH}, one hidden layer of {HIDDEN}. A client's mean time is off from its plan's by a log-normal factor "
         f"({OFF}), each piece again (0.3)."],
        packages=("scikit-learn",),
    )  # fmt: skip


if __name__ == "__main__":
    main()
