"""The model, and each client's share of the digits."""

import functools

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import trainwright as tw


def build_model(seed: int) -> nn.Module:
    """Return the model, the same wherever the seed is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [n, 64] and labels [n]; the last 297 are kept for evaluation."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def share(partition: int, num_clients: int, alpha: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what client `partition` trains on."""
    images, labels = digits()
    parts = tw.federated.dirichlet_split(labels[:1500].numpy(), num_clients, alpha, seed=seed, min_size=10)
    return images[:1500][parts[partition]], labels[:1500][parts[partition]]


def loss_fn(model, batch):
    """Return the loss of a batch (images, labels)."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(arrays: dict[str, np.ndarray], seed: int) -> float:
    """Return the share of the held-out digits that a model of these arrays names."""
    model = build_model(seed)
    tw.federated.load_arrays(model, arrays)
    images, labels = digits()
    with torch.no_grad():
        return float((model(images[1500:]).argmax(1) == labels[1500:]).float().mean())
