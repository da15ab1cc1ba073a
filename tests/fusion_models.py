"""Small models of three kinds, with batches, for the tests of fusion."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Convolutional(nn.Module):
    """Convolutions with and without groups, three norms, pools and both kinds of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, groups=2, bias=False)
        self.group_norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.drop, self.drop_channels = nn.Dropout(0.2), nn.Dropout2d(0.1)
        self.head = nn.Linear(6 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.batch_norm(self.one(x))), 2)
        x = self.up(self.drop_channels(F.gelu(self.group_norm(self.two(x)))))
        return self.head(self.drop(torch.flatten(F.adaptive_avg_pool2d(x, 3), 1)))


class Encoder(nn.Module):
    """An embedding with padding, torch's own transformer layer, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)).mean(1))


class GPT(nn.Module):
    """A causal block with tied embedding and head, attention with dropout."""

    def __init__(self, words: int = 13, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.heads, self.drop = heads, nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        num, length = tokens.shape
        x = self.drop(self.words(tokens) + self.places(torch.arange(length)))
        q, k, v = (
            each.view(num, length, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.out(y.transpose(1, 2).reshape(num, length, -1))
        return self.head(x + self.mlp(x)).transpose(1, 2)


def images(num: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 3, 12, 12), torch.randint(0, 5, (num,))


def sentences(num: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (num, 7)), torch.randint(0, 3, (num,))


def tokens(num: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 13, (num, 8)), torch.randint(0, 13, (num, 8))


MODELS = {"convolutional": (Convolutional, images), "encoder": (Encoder, sentences), "gpt": (GPT, tokens)}
