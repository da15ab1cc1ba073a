"""A classifier of scikit-learn's digits, with its examples."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def build():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32, device="cpu") / 16, torch.tensor(y, device="cpu")

    def loss_fn(logits, batch):
        return nn.functional.cross_entropy(logits, batch[1])

    return {"model": Net(), "batch": (x[:32], y[:32]), "loss_fn": loss_fn, "dataset": TensorDataset(x, y)}
