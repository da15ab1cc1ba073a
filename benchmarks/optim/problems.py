"""What the optimizers are compared on: a small GPT on English text and a small convolutional network on digits.

The text is Python's own language reference, as it stands in the standard library (`pydoc_data.topics`, 465 kB); the
digits are scikit-learn's 1797 images of 8 × 8. Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT, WIDTH, NUM_HEADS, NUM_LAYERS = 64, 64, 4, 2


@dataclass
class Problem:
    """A model to train, batches in a fixed random order, and a loss on data that it never sees."""

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    batch_size: int
    seed: int

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        rows = torch.randint(len(self.train[0]), (self.batch_size,), generator=draw)
        return self.train[0][rows], self.train[1][rows]

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy, and the logits."""
        logits = self.model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten()), logits

    @torch.no_grad()
    def held_out_loss(self) -> float:
        self.model.eval()
        loss = float(self.loss(self.held_out)[0])
        self.model.train()
        return loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, NUM_HEADS, width // NUM_HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        # Written out: the fused kernel has no second derivative, which some of the methods take.
        scores = (q @ k.transpose(-2, -1)) * (width // NUM_HEADS) ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def gpt(seed: int) -> Problem:
    """118 000 parameters, bytes of English, 8 × 64 of them a step."""
    from pydoc_data.topics import topics

    raw = "\n".join(topics[key] for key in sorted(topics)).encode("ascii", "ignore")
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    known = data.unique()
    data = torch.searchsorted(known, data)
    windows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    held = torch.arange(len(windows)) % 20 == 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Gpt(len(known))
    train, test = windows[~held], windows[held][:128]
    return Problem("gpt", model, (train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:]), 8, seed)


def digits(seed: int) -> Problem:
    """20 000 parameters, images of 8 × 8, 64 a step."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 - 0.3
    labels = torch.tensor(data.target, dtype=torch.long)
    held = torch.arange(len(images)) % 4 == 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32),
            nn.ReLU(), nn.Flatten(), nn.Linear(512, 28), nn.ReLU(), nn.Linear(28, 10),
        )  # fmt: skip
    return Problem("digits", model, (images[~held], labels[~held]), (images[held], labels[held]), 64, seed)


PROBLEMS = {"gpt": gpt, "digits": digits}
