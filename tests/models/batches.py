"""A model whose step depends on all that its batch may hold, and batches that its plan does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Masked(nn.Module):
    """Logits of tokens, with a mask that may be left out, a number that is no tensor, and a nested entry."""

    def __init__(self, width: int = 8, vocab: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)

    def forward(
        self, ids: Tensor, labels: Tensor, extra: dict[str, Tensor], mask: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        hidden = self.embed(ids) + extra["bias"].unsqueeze(-1)
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return F.cross_entropy(scale * self.head(hidden).flatten(0, 1), labels.flatten())


def masked(rows: int = 4, length: int = 6) -> tuple[nn.Module, dict[str, Any]]:
    """The model and a batch without a mask."""
    generator = torch.Generator().manual_seed(rows)
    ids, labels = torch.randint(0, 11, (2, rows, length), generator=generator)
    torch.manual_seed(0)
    return Masked(), {"ids": ids, "labels": labels, "extra": {"bias": torch.ones(rows, length)}, "scale": 0.5}


def _with(**entries: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda batch: {**batch, **entries}


def _renamed(batch: dict[str, Any]) -> Any:
    return {"idz" if name == "ids" else name: value for name, value in batch.items()}


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown": lambda batch: {**batch, "mask": torch.ones_like(batch["ids"])},
    "misspelt": _renamed,
    "nested": lambda batch: {**batch, "extra": {**batch["extra"], "more": torch.ones(4)}},
    "none": _with(ids=None),
    "unknown none": _with(mask=None),
    "literal": _with(scale=0.25),
    "literal as tensor": _with(scale=torch.tensor(0.5)),
    "unknown literal": _with(scales=0.5),
    "dtype": lambda batch: {**batch, "ids": batch["ids"].int()},
    "rank": lambda batch: {**batch, "labels": batch["labels"].flatten()},
    "positional": lambda batch: (batch["ids"], batch["labels"]),
    "missing": lambda batch: {name: value for name, value in batch.items() if name != "labels"},
}
"""By name, what becomes of a batch, or a rank's part of it, so that the plan does not know it."""
