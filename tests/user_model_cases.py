"""Models that users write, verified on this rank: for `tests/runtime/test_user_models.py` and `tests/program/test_calls.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trainwright as tw
from tests.models import calls, plain
from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan
from trainwright.capture.cached import cached_capture
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
    return verified_draws(lambda: built(name), mesh, [seed])[0]


def plans_of_a_call(expression: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Verify plans for two ranks, drawn from the whole strategy space, of a model that reads one expression."""
    return verified_draws(lambda: calls.build(expression), [2], seeds)


def verified_draws(build: Callable[[], tuple[Any, ...]], mesh: list[int], seeds: list[int]) -> list[dict[str, Any]]:
    """Verify a plan for each seed, drawn from the whole strategy space of what `build` returns: model, batch, perhaps a loss."""
    model, batch, *loss_fn = build()
    program = build_program(cached_capture(model, batch, *loss_fn))
    plans = [plan_of(program, random_decisions(program, tuple(mesh), seed, 0.5), literals_of(batch)) for seed in seeds]
    return [verify(build, plan).model_dump() for plan in plans]


def threads_with_more_plans(name: str) -> list[int]:
    """Return the threads of this process after each of three plans on four ranks, one after the other."""
    found = []
    for seed in range(3):
        random_plan(name, [2, 2], seed)
        found.append(len(list(Path("/proc/self/task").iterdir())))
    return found
