"""Functions that the tests of attention split along the sequence run on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.plans import plan_of, random_decisions
from trainwright.models import zoo
from trainwright.program.groups import Group
from trainwright.program.micro_batches import capture_step
from trainwright.program.program import Program
from trainwright.runtime.verification.verify import verify

NAME = "scaled_dot_product_attention"


def program_of(kind: str, micro_batches: int = 1, **settings: Any) -> Program:
    """Return the program of a step of a zoo model."""
    return capture_step(*zoo.build(kind, device="meta", **settings), None, None, micro_batches)


def attention_groups(program: Program) -> list[Group]:
    """The groups that attend."""
    return [g for c in program.classes for g in c.groups if any(op.name == NAME for op in g.ops)]


def forced(
    kind: str, mesh: list[int], split: list[str], seed: int, micro_batches: int = 1, recompute: float = 0.5, **settings: Any
) -> dict[str, Any]:
    """Verify a plan drawn from the whole space but for attention's split, in float64; an unknown loop is an error."""
    program = program_of(kind, micro_batches, **settings)
    decisions = random_decisions(program, tuple(mesh), seed, recompute)
    for group in attention_groups(program):
        names = {loop.name: index for index, loop in enumerate(group.loops) if not loop.whole} | {"-": -1}
        decisions.splits[group] = tuple(names[name] for name in split)
    batch = zoo.build(kind, device="meta", **settings)[1]
    literals = {name: value for name, value in batch.items() if not isinstance(value, Tensor)}
    fields = {"micro_batches": micro_batches, "corrections": dict(program.corrections)}
    plan = plan_of(program, decisions, literals).model_copy(update=fields)
    return verify(lambda: zoo.build(kind, device="cpu", **settings), plan, dtype="float64").model_dump()
