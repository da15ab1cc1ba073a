"""FZooS against random gradients and finite differences at equal queries: `python -m benchmarks.federated.zeroth_order`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.federated import world
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright import federated
from trainwright.federated import FZooSClient, FZooSRun, FZooSSettings

Fun = Callable[[np.ndarray], float]
Objective = Callable[[np.ndarray], float]


class Counted:
    """A function, and how often it was asked."""

    def __init__(self, fun: Fun) -> None:
        self.fun, self.count = fun, 0

    def __call__(self, x: np.ndarray) -> float:
        self.count += 1
        return self.fun(x)


def fzoos(
    funs: list[Fun], x0: np.ndarray, budget: int, bounds: Any = None, **settings: Any
) -> tuple[list[np.ndarray], int]:
    counted = [Counted(fun) for fun in funs]
    run = FZooSRun.begin(x0, FZooSSettings(**settings))
    clients = {f"c{k}": FZooSClient(fun, seed=k, bounds=bounds) for k, fun in enumerate(counted)}
    path = [run.x]
    while sum(each.count for each in counted) < budget:
        path.append(run.round(clients))
    return path, sum(each.count for each in counted)


def by_slopes(
    funs: list[Fun],
    x0: np.ndarray,
    budget: int,
    slope: Callable[[Fun, np.ndarray], np.ndarray],
    lr: float,
    num_steps: int = 10,
) -> tuple[list[np.ndarray], int]:
    """FedAvg with estimated gradients (FedZO): `num_steps` local steps, then the mean of the clients' points."""
    counted = [Counted(fun) for fun in funs]
    x, path = x0.copy(), [x0]
    while sum(each.count for each in counted) < budget:
        reached = []
        for fun in counted:
            own = x.copy()
            for _ in range(num_steps):
                own = own - lr * slope(fun, own)
            reached.append(own)
        x = np.mean(reached, axis=0)
        path.append(x)
    return path, sum(each.count for each in counted)


def random_gradient(count: int, radius: float, seed: int = 0) -> Callable[[Fun, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)

    def slope(fun: Fun, x: np.ndarray) -> np.ndarray:
        value, drawn = fun(x), rng.normal(size=(count, len(x)))
        return np.mean([(fun(x + radius * u) - value) / radius * u for u in drawn], axis=0)

    return slope


def differences(radius: float) -> Callable[[Fun, np.ndarray], np.ndarray]:
    def slope(fun: Fun, x: np.ndarray) -> np.ndarray:
        value = fun(x)
        return np.array([(fun(x + radius * unit) - value) / radius for unit in np.eye(len(x))])

    return slope


def quadratics() -> tuple[list[Fun], Objective]:
    rng = np.random.default_rng(0)
    curves, centres = [], []
    for _ in range(4):
        factor = rng.normal(size=(10, 10))
        curves.append(factor @ factor.T / 10 + 0.5 * np.eye(10))
        centres.append(rng.normal(size=10))
    best = np.linalg.solve(sum(curves), sum(curve @ centre for curve, centre in zip(curves, centres)))
    funs = [
        lambda x, curve=curve, centre=centre: float(0.5 * (x - centre) @ curve @ (x - centre))
        for curve, centre in zip(curves, centres)
    ]
    least = float(np.mean([fun(best) for fun in funs]))
    return funs, lambda x: float(np.mean([fun(x) for fun in funs])) - least


def on_quadratics(budget: int = 6000) -> list[dict[str, Any]]:
    funs, excess = quadratics()
    x0 = np.ones(10)
    sgd = {"optimizer": "sgd", "lr": 0.05, "length_scale": 2.0, "num_fit_queries": 20, "num_features": 600}
    kinds = {
        "FZooS, γ = 1": lambda: fzoos(funs, x0, budget, **sgd),
        "FZooS, γ = 1/t": lambda: fzoos(funs, x0, budget, decay=True, **sgd),
        "FZooS without correction": lambda: fzoos(funs, x0, budget, correction=0.0, **sgd),
        "random gradients, 20 directions": lambda: by_slopes(funs, x0, budget, random_gradient(20, 0.01), 0.05),
        "finite differences": lambda: by_slopes(funs, x0, budget, differences(0.01), 0.05),
    }
    return [measured(name, kind, excess, "F - F* at the end") for name, kind in kinds.items()]


def metric_problem(num_clients: int = 7) -> tuple[list[Fun], Objective, np.ndarray]:
    """Some clients, each with two or three of the digits' classes more than others: 1 - macro F1 of a linear classifier, d = 650.

    The classifier was trained on 200 examples of five classes alone, so that there is something to gain. No gradient exists.
    """
    images, labels = world.digits()
    parts = federated.dirichlet_split(labels[:1500].numpy(), num_clients, 1.0, seed=3, min_size=60)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:60]), labels[:60]).backward()
        optimizer.step()
    start = torch.cat([model.weight.detach().reshape(-1), model.bias.detach()]).double().numpy()
    data = [(images[part].double().numpy(), labels[part].numpy()) for part in parts]
    funs: list[Fun] = [lambda x, own=own: one_minus_f1(start + x, *own) for own in data]
    held = (images[1500:].double().numpy(), labels[1500:].numpy())
    return funs, lambda x: one_minus_f1(start + x, *held), np.zeros(650)


def one_minus_f1(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> float:
    named = (images @ weights[:640].reshape(10, 64).T + weights[640:]).argmax(1)
    right = np.bincount(labels[named == labels], minlength=10)
    total = np.bincount(named, minlength=10) + np.bincount(labels, minlength=10)
    present = np.bincount(labels, minlength=10) > 0
    return 1.0 - float(np.mean(2 * right[present] / np.maximum(total[present], 1)))


def on_a_metric(budget: int = 5_000) -> list[dict[str, Any]]:
    funs, held_out, x0 = metric_problem()

    def trained_on(x: np.ndarray) -> float:
        return float(np.mean([fun(x) for fun in funs]))

    shared = {
        "lr": 0.02,
        "radius": 0.1,
        "spread": 0.3,
        "noise": 1e-2,
        "nearest": 100,
        "nearest_fit": 200,
        "num_features": 1000,
    }
    kinds = {
        "FZooS, γ = 1": lambda: fzoos(funs, x0, budget, **shared),
        "FZooS, γ = 1/t": lambda: fzoos(funs, x0, budget, decay=True, **shared),
        "FZooS without correction": lambda: fzoos(funs, x0, budget, correction=0.0, **shared),
        "random gradients, 20 directions": lambda: by_slopes(funs, x0, budget, random_gradient(20, 0.1), 0.05),
        "finite differences": lambda: by_slopes(funs, x0, budget, differences(0.1), 0.05, num_steps=1),
    }
    rows = [{"method": "start", "1 - F1 on the clients": trained_on(x0), "1 - F1 held out": held_out(x0)}]
    for name, kind in kinds.items():
        row = measured(name, kind, trained_on, "1 - F1 on the clients", {"1 - F1 held out": held_out})
        rows.append(row)
    return rows


def measured(
    name: str, kind: Callable[[], Any], objective: Objective, column: str, more: dict[str, Objective] | None = None
) -> dict[str, Any]:
    begun = time.process_time()
    path, count = kind()
    row = {
        "method": name,
        column: objective(path[-1]),
        **{key: fun(path[-1]) for key, fun in (more or {}).items()},
        "queries": count,
        "rounds": len(path) - 1,
        "CPU s": time.process_time() - begun,
    }
    print(row, flush=True)
    assert all(not isinstance(value, float) or not math.isinf(value) for value in row.values())
    return row


def main() -> None:
    write(
        "federated-zeroth-order",
        {
            "four quadratics, d = 10, 6,000 queries": on_quadratics(),
            "1 - F1 of a linear classifier on digits, d = 650, seven clients, 5,000 queries": on_a_metric(),
        },
        [CPU_SECONDS, "Random gradients and differences run FedAvg with 10 local steps of lr 0.05 (differences on the metric: 1, "
         "for one takes 651 queries); radius 0.01, on the metric 0.1."],
        packages=("scikit-learn",),
    )  # fmt: skip


if __name__ == "__main__":
    main()
