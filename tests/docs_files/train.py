"""The user's file of the documentation: a small language model, its examples, and `build` for the command line."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class MyModel(nn.Module):
    """An embedding, three residual blocks, and a head for the next token."""

    def __init__(self, vocab: int = 260, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def example(index: int) -> dict[str, Tensor]:
    ids = (torch.arange(32) + 7 * index) % 200
    return {"input_ids": ids, "labels": ids}


dataset = [example(index) for index in range(40)]
batches = [torch.utils.data.default_collate(dataset[start : start + 8]) for start in range(0, 40, 8)]


def build(batch_size: int = 8, depth: int = 3):
    batch = torch.utils.data.default_collate(dataset[:batch_size])
    return {"model": MyModel(depth=depth), "batch": batch, "dataset": dataset}
