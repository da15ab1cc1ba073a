"""Models that users write, verified on this rank: called by `tests/runtime/test_user_models.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainwright as tw
from tests.models import plain
from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan
from trainwright.capture.export import capture
from trainwright.program.program import build_program
from trainwright.request import literals_of
from trainwright.runtime.verification.verify import verify


def built(name: str) -> tuple[Any, ...]:
    """Return model, batch and, where there is one, loss of the builder of that name, the same on each call."""
    torch.manual_seed(1)
    return getattr(plain, name)()


def verified(plan: str, name: str) -> dict[str, Any]:
    """Compare a plan with one process in float64; measure the peaks."""
    return tw.verify(lambda: built(name), Plan.parse(plan)).model_dump()


def random_plan(name: str, mesh: list[int], seed: int) -> dict[str, Any]:
    """Verify a plan drawn from the whole strategy space."""
    model, batch, *loss_fn = built(name)
    program = build_program(capture(model, batch, *loss_fn))
    plan = plan_of(program, random_decisions(program, tuple(mesh), seed, 0.5), literals_of(batch))
    return verify(lambda: built(name), plan).model_dump()


def threads_with_more_plans(name: str) -> list[int]:
    """Return the threads of this process after each of three plans on four ranks, one after the other."""
    found = []
    for seed in range(3):
        random_plan(name, [2, 2], seed)
        found.append(len(list(Path("/proc/self/task").iterdir())))
    return found
