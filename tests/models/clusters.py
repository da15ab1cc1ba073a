"""Classifiers with the examples they are trained on, as a user's file gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES, NUM_FEATURES = 4, 6


def examples(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Four classes of five clusters each, large and small, off the origin; in double precision."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(5 * NUM_CLASSES, NUM_FEATURES, generator=generator, dtype=torch.float64) + 1
    share = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5]).repeat(NUM_CLASSES)
    which = torch.multinomial(share, num, replacement=True, generator=generator)
    noise = torch.randn(num, NUM_FEATURES, generator=generator, dtype=torch.float64)
    return centres[which] + 0.4 * noise, which // 5


class Net(nn.Module):
    """Logits of x; what else stands in the batch is for the loss."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.head(self.body(x))


def mean_loss(logits: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(logits, batch[1])


def weighted_loss(logits: Tensor, batch: Any) -> Tensor:
    losses = nn.functional.cross_entropy(logits, batch[1], reduction="none")
    return (batch[2] * losses).sum() / batch[2].sum()


def drawn(num: int = 300, batch_size: int = 16, dropout: float = 0.0) -> dict[str, Any]:
    """The loss is a mean: examples are drawn in proportion to their weights."""
    x, y = examples(num)
    model, batch = Net(dropout=dropout).double(), (x[:batch_size], y[:batch_size])
    return {"model": model, "batch": batch, "loss_fn": mean_loss, "dataset": TensorDataset(x, y)}


def weighted(num: int = 300, batch_size: int = 16) -> dict[str, Any]:
    """The loss takes the weights, as the last entry of the batch."""
    found = drawn(num, batch_size)
    batch = (*found["batch"], torch.ones(batch_size, dtype=torch.float64))
    return {**found, "batch": batch, "loss_fn": weighted_loss}


def augmentable(num: int = 300, batch_size: int = 16) -> dict[str, Any]:
    """With a strong augmentation, noise from NumPy's generator."""

    def augment(example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = example
        return x + 0.3 * torch.from_numpy(np.random.normal(size=len(x))), y

    return {**drawn(num, batch_size), "augment": augment}


def only_a_loss() -> dict[str, Any]:
    """A model that keeps its logits to itself."""

    class Alone(Net):
        def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
            return nn.functional.cross_entropy(super().forward(x, y), y)

    found = drawn()
    return {"model": Alone().double(), "batch": found["batch"], "dataset": found["dataset"]}


def other_examples() -> dict[str, Any]:
    """Examples of another shape than the batch's."""
    x, y = examples(40)
    return {**drawn(), "dataset": TensorDataset(x[:, :5], y)}


def no_examples() -> dict[str, Any]:
    found = drawn()
    return {key: value for key, value in found.items() if key != "dataset"}


def images(num: int = 96, batch_size: int = 16) -> dict[str, Any]:
    """A vision transformer of Hugging Face's with examples as dicts: the class is in which quarter the light is."""
    from trainwright.models import zoo

    model, batch = zoo.build("vit-tiny", device="cpu", dtype="fp64", batch_size=batch_size)
    generator = torch.Generator().manual_seed(0)
    shape = batch["pixel_values"].shape[1:]
    labels = torch.randint(4, (num,), generator=generator)
    pixels = 0.3 * torch.randn(num, *shape, generator=generator, dtype=torch.float64)
    half = shape[-1] // 2
    for image, label in zip(pixels, labels.tolist()):
        image[:, (label // 2) * half :, (label % 2) * half :][:, :half, :half] += 2.0
    dataset = [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels)]
    return {"model": model, "batch": batch, "dataset": dataset}
