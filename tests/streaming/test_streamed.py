"""Streamed MeZO against MeZO: equal to the bit, whatever the model, the groups, the types and who looks when."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.artifacts import UserError
from trainwright.optim.mezo import MeZO
from trainwright.streaming import HostStore, Streamed, block_names, find_parts, peak_of_step, predicted_peak


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Tokens(nn.Module):
    """An embedding, blocks, a head; what is awkward about it is chosen by `kind`."""

    def __init__(self, kind: str = "plain", dropout: float = 0.0, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.wte = nn.Embedding(11, width)
        self.place = nn.Parameter(torch.randn(5, width) * 0.1)
        self.h = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.batch_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        if kind == "tied":
            self.head.weight = self.wte.weight
        if kind == "shared block":
            self.h[2] = self.h[0]
        if kind == "tied blocks":
            self.h[1].up.weight = self.h[3].up.weight
        if kind == "frozen":
            self.h[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.place[: ids.shape[1]]
        for index, block in enumerate(self.h):
            if self.kind == "its own loop":
                x = x + block.down(F.gelu(block.up(block.norm(x))))
            elif self.kind != "skips" or index != int(torch.randint(4, ())):
                x = block(x)
            if self.kind == "reads a block" and index == 3:
                x = x * self.h[0].norm.weight
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return F.linear(x, self.wte.weight) if self.kind == "read elsewhere" else self.head(x)


KINDS = [
    "plain",
    "tied",
    "shared block",
    "tied blocks",
    "frozen",
    "its own loop",
    "skips",
    "reads a block",
    "read elsewhere",
]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, the others without."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "lr": 3e-3},
    ]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (3, 5), generator=generator) for _ in range(4)]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def trained(model: nn.Module, streams: bool, **options: Any) -> tuple[list[float], nn.Module]:
    store, storage = options.pop("store", None), options.pop("storage", None)
    optimizer = MeZO(groups(model), lr=1e-2, seed=5, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    streamed = Streamed(model, optimizer, store, storage=storage) if streams else None
    torch.manual_seed(3)
    losses = []
    for ids in batches():
        losses.append(optimizer.step(lambda ids=ids: loss_of(model, ids)))
        schedule.step()
    losses.append(float(torch.rand(())))  # torch's generator goes on where MeZO leaves it
    return losses, model if streamed is None else streamed.close()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_mezos_to_the_bit(kind: str, exact: bool) -> None:
    torch.manual_seed(0)
    model = Tokens(kind, dropout=0.3)
    one, whole = trained(copy.deepcopy(model), streams=False, exact=exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other, streamed = trained(model, streams=True, exact=exact)
    assert one == other
    assert_equal(whole, streamed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_so_are_they_in_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tokens("tied", dropout=0.3).to(dtype)
    one, whole = trained(copy.deepcopy(model), streams=False)
    other, streamed = trained(model, streams=True)
    assert one == other
    assert_equal(whole, streamed)
