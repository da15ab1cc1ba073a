"""The federation of the benchmarks: digits on clients with few of the labels each, speeds of all kinds, 10 × stragglers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import trainwright as tw
from trainwright.federated import LocalMethod, LocalTraining, SimulatedClient, Speeds, dirichlet_split, load_arrays

NUM_TRAIN = 1500


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build(hidden: int = 32) -> nn.Module:
    torch.manual_seed(0)
    if not hidden:
        return nn.Linear(64, 10)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def works(
    num_clients: int, model: nn.Module, *, alpha: float, lr: float, num_steps: int, batch_size: int,
    method: LocalMethod | None = None, split_seed: int = 1, draw_seed: int = 0,
) -> dict[str, LocalTraining]:  # fmt: skip
    """Return the work of each client; with more clients than examples would do for, they share examples."""
    images, labels = digits()
    copies = -(-num_clients * 10 // NUM_TRAIN)
    places = np.tile(np.arange(NUM_TRAIN), copies)
    parts = dirichlet_split(labels[places].numpy(), num_clients, alpha, seed=split_seed, min_size=2)
    make = functools.partial(tw.optim.create, "sgd", lr=lr)
    return {
        f"c{k}": LocalTraining(
            model, (images[places[part]], labels[places[part]]), loss_fn, make, num_steps=num_steps, batch_size=batch_size,
            seed=k + 1_000 * draw_seed, method=method,
        )
        for k, part in enumerate(parts)
    }  # fmt: skip


def federation(works: dict[str, LocalTraining], predicted: bool = True) -> dict[str, SimulatedClient]:
    """Return the clients: log-normal means, a tenth of them 10 × slower, and from one piece to the next log-normal again."""
    speeds = Speeds.of_federation(len(works), spread=0.5, stragglers=0.1, slower=10.0, sigma=0.3, seed=2)
    return {
        name: SimulatedClient(work, speed, len(work.batches.data[1]), speed.mean_s if predicted else None)
        for (name, work), speed in zip(works.items(), speeds)
    }


def accuracy(model: nn.Module, arrays: Any) -> float:
    load_arrays(model, arrays)
    images, labels = digits()
    with torch.no_grad():
        return float((model(images[NUM_TRAIN:]).argmax(1) == labels[NUM_TRAIN:]).float().mean())
