"""Models of plain PyTorch for the profiler's table: each a function that returns (model, batch, loss_fn).

They are what the architectures of a library are not: skips across a whole net, recurrence in one kernel, einsums,
weights that are tied, frozen or unused, several losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Built = tuple[nn.Module, Any, Callable[[Any, Any], Tensor] | None]


class UNet(nn.Module):
    """Down, across and up again, each level's features joined to those that come back up."""

    def __init__(self, widths: tuple[int, ...] = (12, 20, 36)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(before, width) for before, width in zip((3, *widths), widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for wide, narrow in pairs)
        self.join = nn.ModuleList(_twice(2 * narrow, narrow) for _, narrow in pairs)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            image = level(F.max_pool2d(image, 2) if skips else image)
            skips.append(image)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1]):
            image = join(torch.cat([skip, up(image)], 1))
        return F.cross_entropy(self.head(image), label)


def _twice(before: int, after: int) -> nn.Sequential:
    first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
    return nn.Sequential(first, nn.BatchNorm2d(after), nn.ReLU(), second, nn.BatchNorm2d(after), nn.ReLU())


class ConvNet(nn.Module):
    """A convolutional classifier with batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 48, 3, padding=1)
        self.features = nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), second)
        self.head = nn.Linear(48, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(image).relu().mean((2, 3))), label)


class Recurrent(nn.Module):
    """A language model over `kind`, one of torch's recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], **more: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = kind(32, 48, 2, batch_first=True, **more)
        self.head = nn.Linear(96 if self.layers.bidirectional else 48, 100)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(ids))[0]).flatten(0, 1), ids.flatten())


class Mixer(nn.Module):
    """Tokens mixed by one einsum, channels by another."""

    def __init__(self, num_tokens: int = 29, width: int = 56) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.tokens = nn.ParameterList(nn.Parameter(torch.randn(num_tokens, num_tokens) / 5) for _ in range(2))
        self.channels = nn.ParameterList(nn.Parameter(torch.randn(width, 7, 8) / 7) for _ in range(2))
        self.head = nn.Linear(width, 11)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for index, (tokens, channels) in enumerate(zip(self.tokens, self.channels)):
            x = x + torch.einsum("btc,ts->bsc", self.norms[2 * index](x), tokens)
            x = x + torch.einsum("btc,chd->bthd", self.norms[2 * index + 1](x), channels).flatten(2).tanh()
        return F.cross_entropy(self.head(x.mean(1)), label)


class TiedAndFrozen(nn.Module):
    """A tied embedding, a frozen layer, an unused one, a stray tensor, and a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.unused = nn.Linear(32, 8)
        self.part = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 97, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.linspace(0.5, 1.5, 32)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.frozen(self.embed(ids)) * self.scale
        x = x + checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=False)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


class SeveralLosses(nn.Module):
    """One trunk, three heads: classes, a regression, and the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(61, 160), nn.GELU(), nn.Linear(160, 96), nn.SiLU())
        self.classes, self.value, self.decoder = nn.Linear(96, 13), nn.Linear(96, 1), nn.Linear(96, 61)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.classes(hidden), self.value(hidden).squeeze(-1), self.decoder(hidden)


def several_losses() -> Built:
    def loss_fn(out: Any, batch: Any) -> Tensor:
        classes, value, decoded = out
        label = torch.arange(classes.shape[0]) % 13
        return (
            F.cross_entropy(classes, label)
            + F.smooth_l1_loss(value, value.detach() + 1)
            + F.mse_loss(decoded, batch[0])
        )

    return SeveralLosses(), (torch.randn(45, 61),), loss_fn


class Encoder(nn.Module):
    """torch's own `TransformerEncoder` (its training path), post-norm and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(56, 7, 150, dropout=0.1, batch_first=True)
        self.embed, self.layers, self.head = nn.Embedding(83, 56), nn.TransformerEncoder(layer, 2), nn.Linear(56, 83)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(ids))).flatten(0, 1), ids.flatten())


def mlp() -> Built:
    model = nn.Sequential(nn.Linear(40, 120), nn.GELU(), nn.Linear(120, 7))
    return model, (torch.randn(30, 40),), lambda out, batch: out.logsumexp(-1).mean()


def unet() -> Built:
    return UNet(), (torch.randn(3, 3, 40, 24), torch.randint(0, 2, (3, 40, 24))), None


def conv_net() -> Built:
    return ConvNet(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))), None


def lstm() -> Built:
    return Recurrent(nn.LSTM), (torch.randint(0, 100, (5, 20)),), None


def lstm_both_ways() -> Built:
    return Recurrent(nn.LSTM, bidirectional=True), (torch.randint(0, 100, (3, 23)),), None


def gru() -> Built:
    return Recurrent(nn.GRU), (torch.randint(0, 100, (5, 20)),), None


def mixer() -> Built:
    return Mixer(), (torch.randn(5, 29, 56), torch.randint(0, 11, (5,))), None


def tied_and_frozen() -> Built:
    return TiedAndFrozen(), (torch.randint(0, 97, (6, 21)),), None


def encoder() -> Built:
    return Encoder(), (torch.randint(0, 83, (3, 31)),), None
