"""Models whose losses treat the batch in every way that matters for micro-batches: builders for the command line's MODEL."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, WIDTH, CLASSES = 8, 12, 5


class _Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, CLASSES))

    def rows(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(torch.tanh(self.first(x))))


def _data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def _built(forward: Any, labels: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    net = type("Net", (_Net,), {"forward": forward})(**options)
    x, known = _data()
    return net, (x, known if labels is None else labels(known))


def _ignored(labels: Tensor) -> Tensor:
    """In the first two micro-batches of four nothing, and one label, counts."""
    labels = labels.clone()
    labels[:3] = -100
    labels[6] = -100
    return labels


def uneven_labels(**_: Any) -> Any:
    """A mean over labels of which the micro-batches have different numbers, one of them none."""
    return _built(lambda self, x, y: F.cross_entropy(self.rows(x), y), _ignored)


def weighted_classes(**_: Any) -> Any:
    """A mean by the weights of classes."""
    return _built(lambda self, x, y: F.cross_entropy(self.rows(x), y, self.class_weights), _ignored)


def uneven_likelihood(**_: Any) -> Any:
    """The same of log-probabilities, beside a mean over labels that are probabilities."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        rows, shares = self.rows(x), torch.softmax(x[:, :CLASSES], -1)
        return F.nll_loss(rows.log_softmax(-1), y) + F.cross_entropy(rows, shares, self.class_weights)

    return _built(forward, _ignored)


def summed(**_: Any) -> Any:
    """A sum over the batch."""
    return _built(lambda self, x, y: F.cross_entropy(self.rows(x), y, reduction="sum"))


def over_batch_size(**_: Any) -> Any:
    """A sum, divided by the batch's size as a number."""
    return _built(lambda self, x, y: F.cross_entropy(self.rows(x), y, reduction="sum") / x.shape[0])


def masked_mean(**_: Any) -> Any:
    """A mean written by hand: over the entries that a mask leaves, of which micro-batches have different numbers."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        mask = (y > 1).to(x.dtype)
        return (F.cross_entropy(self.rows(x), y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    return _built(forward)


def regularised(**_: Any) -> Any:
    """A mean, and a penalty that depends on no example."""
    return _built(lambda self, x, y: F.cross_entropy(self.rows(x), y) + 0.1 * self.first.weight.pow(2).sum())


def sloped(**_: Any) -> Any:
    """The gradient of a sum over the batch, and of a mean, with respect to what each example gives, as critics are held to."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x))
        rows = self.second(inner).square()
        (each,) = torch.autograd.grad(rows.sum(), inner, create_graph=True)
        (shared,) = torch.autograd.grad(rows.mean(), inner, create_graph=True)
        return (each.norm(dim=-1) - 1).square().mean() + shared.square().sum() + (rows.sum(-1) - y).square().mean()

    return _built(forward)


def with_dropout(**_: Any) -> Any:
    """Random masks."""
    return _built(lambda self, x, y: F.cross_entropy(self.rows(x), y), dropout=0.5)


def drawn(**_: Any) -> Any:
    """Random numbers of all kinds: for each example, for all of its features, for each by its values, and for a parameter."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        time = torch.randint(1, 50, (x.shape[0],), device=x.device) / 50
        inner = torch.tanh(self.first(x + time[:, None] * torch.randn_like(x)))
        inner = inner * torch.bernoulli(torch.sigmoid(inner.detach())) + torch.rand(inner.shape, dtype=x.dtype)
        inner = inner * x.new_empty(x.shape[0], 1).bernoulli_(0.8) + F.dropout(inner[:, :1], 0.3, self.training)
        weight = self.second.weight + 0.1 * torch.randn_like(self.second.weight)
        return F.cross_entropy(F.rrelu(F.linear(inner, weight), training=self.training), y)

    return _built(forward)


def noised(**_: Any) -> Any:
    """Noise before a head whose loss can be taken in chunks."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x))
        return F.cross_entropy(self.second(inner + 0.1 * torch.rand_like(inner)), y)

    return _built(forward)


def shuffled(**_: Any) -> Any:
    """Examples mixed with one another, in a random order."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        other = torch.randperm(x.shape[0], device=x.device)
        return F.cross_entropy(self.rows(0.7 * x + 0.3 * x[other]), y)

    return _built(forward)


def contrastive(**_: Any) -> Any:
    """Examples compared with one another."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        rows = F.normalize(self.rows(x), dim=-1)
        return F.cross_entropy(rows @ rows.T, y)

    return _built(forward)


def centred(**_: Any) -> Any:
    """Each example less the batch's mean."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        rows = self.rows(x)
        return F.cross_entropy(rows - rows.mean(0), y)

    return _built(forward)


def squared(**_: Any) -> Any:
    """The square of an average."""
    return _built(lambda self, x, y: self.rows(x).mean().square())


def numbered(**_: Any) -> Any:
    """Examples weighted by their place in the batch."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(self.rows(x), y, reduction="none") * torch.arange(x.shape[0])).mean()

    return _built(forward)


def sized(**_: Any) -> Any:
    """The batch's size in a tensor."""
    return _built(lambda self, x, y: self.rows(x).square().sum() / torch.full((), x.shape[0]))


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x)).flatten(0, 1), labels.flatten())


def torchs_encoder(**_: Any) -> tuple[nn.Module, Any]:
    """Rows of which torch's attention has the batch as the inner part: positions before examples."""
    torch.manual_seed(1)
    labels = torch.randint(CLASSES, (BATCH, 6))
    labels[:3, 2:] = -100
    return _Encoder(), (torch.randn(BATCH, 6, WIDTH), labels)
