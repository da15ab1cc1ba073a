"""Functions that the tests of attention split along the sequence run on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan
from trainwright.models import zoo
from trainwright.program.groups import Group
from trainwright.program.micro_batches import capture_step
from trainwright.program.program import Program
from trainwright.runtime.verification.verify import verify


class Positions(nn.Module):
    """One block whose attention reads places: learned positions, and what `kind` says of who sees whom.

    packed: documents of a sequence, by the lengths in the batch, see themselves alone; banded: a bias that falls with the distance
    inside a window; open: all see all.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.places, self.joined = nn.Embedding(23, 12), nn.Embedding(10, 12), nn.Linear(12, 36)
        self.out, self.head = nn.Linear(12, 12), nn.Linear(12, 23)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.places(places)
        query, key, value = self.joined(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = self.mask(places, lengths, x.dtype)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))
        return self.head(torch.tanh(x))

    def mask(self, places: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return who sees whom: [b, 1, s, s] or [s, s]."""
        if self.kind == "open":
            return None
        far = places.unsqueeze(1) - places
        if self.kind == "banded":
            return torch.where((far >= 0) & (far < 4), -0.1 * far.to(dtype), torch.finfo(dtype).min)
        documents = (places >= lengths.cumsum(1).unsqueeze(-1)).sum(1)
        return ((documents.unsqueeze(2) == documents.unsqueeze(1)) & (far >= 0)).unsqueeze(1)


def _next_token(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def build(kind: str, device: str = "cpu", **settings: Any) -> tuple[Any, ...]:
    """Return a zoo model, or `Positions` by its kind with ten tokens of two samples, and its loss."""
    if kind not in ("packed", "banded", "open"):
        return zoo.build(kind, device=device, **settings)
    torch.manual_seed(0)
    lengths = torch.tensor([[3, 6, 1], [5, 1, 4]])
    batch = {"ids": torch.arange(20).view(2, 10) * 7 % 23, "lengths": lengths}
    return Positions(kind).to(device), {name: value.to(device) for name, value in batch.items()}, _next_token


NAME = "scaled_dot_product_attention"


def program_of(kind: str, micro_batches: int = 1, **settings: Any) -> Program:
    """Return the program of a step."""
    model, batch, *loss_fn = build(kind, "meta", **settings)
    return capture_step(model, batch, loss_fn[0] if loss_fn else None, None, micro_batches)


def attention_groups(program: Program) -> list[Group]:
    """The groups that attend."""
    return [g for c in program.classes for g in c.groups if any(op.name == NAME for op in g.ops)]


def forced(
    kind: str,
    mesh: list[int],
    split: list[str],
    seed: int,
    micro_batches: int = 1,
    recompute: float = 0.5,
    **settings: Any,
) -> dict[str, Any]:
    """Verify a plan drawn from the whole space but for attention's split, in float64; an unknown loop is an error."""
    program = program_of(kind, micro_batches, **settings)
    decisions = random_decisions(program, tuple(mesh), seed, recompute)
    for group in attention_groups(program):
        names = {loop.name: index for index, loop in enumerate(group.loops) if not loop.whole} | {"-": -1}
        decisions.splits[group] = tuple(names[name] for name in split)
    batch = build(kind, "meta", **settings)[1]
    literals = {name: value for name, value in batch.items() if not isinstance(value, Tensor)}
    fields = {"micro_batches": micro_batches, "corrections": dict(program.corrections)}
    plan = plan_of(program, decisions, literals).model_copy(update=fields)
    return verify(lambda: build(kind, **settings), plan, dtype="float64").model_dump()


def reported(kind: str, plan: str, **settings: Any) -> dict[str, Any]:
    """Return the report of `verify` in the plan's own precision, peaks included."""
    return verify(lambda: build(kind, **settings), Plan.parse(plan)).model_dump()
