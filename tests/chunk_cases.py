"""Functions that the tests of losses in chunks run on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan
from trainwright.models import zoo
from trainwright.ops.linear_loss import NAME
from trainwright.program.micro_batches import capture_step
from trainwright.program.program import Program
from trainwright.runtime.verification.verify import verify


class Head(nn.Module):
    """Embedding, one hidden layer and a head with a bias, whose logits the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(22, 8), nn.Linear(8, 12), nn.Linear(12, 22)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(ids))))


def shifted(logits: Tensor, batch: Any) -> Tensor:
    """The smoothed loss of the next token, summed and divided, some labels left out."""
    labels = batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 22), labels.reshape(-1), reduction="sum", label_smoothing=0.1, ignore_index=3
    )
    return total / 7.0


def transposed(logits: Tensor, batch: Any) -> Tensor:
    """The mean loss with the classes along the second dim, each with a weight."""
    weight = torch.arange(1, 23, dtype=logits.dtype, device=logits.device) / 22
    return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], weight=weight)


def by_token(logits: Tensor, batch: Any) -> Tensor:
    """The losses of single tokens, each with a weight of its own, added up."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * torch.arange(1, 25, dtype=logits.dtype, device=logits.device)).sum() / 100.0


def divided(logits: Tensor, batch: Any) -> Tensor:
    """The summed loss, divided."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / 24.0


def build(kind: str, device: str = "cpu") -> tuple[Any, ...]:
    """Return a zoo model, or `Head` with one of the losses above, some labels −100; values are the same each time."""
    if kind not in LOSSES:
        model, batch = zoo.build(kind, device=device)
        if device != "meta":
            batch["labels"][:, 3] = -100
            batch["labels"][0] = -100
        return model, batch
    torch.manual_seed(0)
    ids = torch.arange(4 * 6).view(4, 6) * 7 % 22
    model, batch = Head(), {"ids": ids, "labels": (ids * 5 + 1) % 22}
    if device == "meta":
        return model.to("meta"), {name: value.to("meta") for name, value in batch.items()}, LOSSES[kind]
    return model, batch, LOSSES[kind]


LOSSES = {"shifted": shifted, "transposed": transposed, "by_token": by_token, "divided": divided}


def program_of(kind: str, chunks: int, micro_batches: int = 1) -> Program:
    """Return the program of a step whose loss is taken in so many chunks, 0: with whole logits."""
    model, batch, *loss_fn = build(kind, device="meta")
    return capture_step(model, batch, loss_fn[0] if loss_fn else None, None, micro_batches, loss_chunks=chunks)


def forced(
    kind: str, mesh: list[int], split: list[str], seed: int, chunks: int, micro_batches: int = 1
) -> dict[str, Any]:
    """Verify a plan drawn from the whole space but for the loss's split, in float64; an unknown loop is an error."""
    program = program_of(kind, chunks, micro_batches)
    decisions = random_decisions(program, tuple(mesh), seed)
    name = NAME if chunks else "cross_entropy_loss"
    (group,) = [g for c in program.classes for g in c.groups if any(op.name == name for op in g.ops)]
    names = [loop.name for loop in group.loops]
    decisions.splits[group] = tuple(names.index(name) if name != "-" else -1 for name in split)
    literals = {} if kind in LOSSES else {n: v for n, v in build(kind, "meta")[1].items() if not isinstance(v, Tensor)}
    plan: Plan = plan_of(program, decisions, literals)
    fields = {"loss_chunks": chunks, "micro_batches": micro_batches, "corrections": dict(program.corrections)}
    return verify(lambda: build(kind), plan.model_copy(update=fields), dtype="float64").model_dump()
