"""Plans of single calls, verified on this rank: called by `tests/program/test_calls.py`."""

from __future__ import annotations

from typing import Any

from tests.models.calls import build
from tests.plans import plan_of, random_decisions
from trainwright.capture.export import capture
from trainwright.program.program import build_program
from trainwright.request import literals_of
from trainwright.runtime.verification.verify import verify


def random_plans(expression: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Verify plans for two ranks drawn from the whole strategy space."""
    model, batch = build(expression)
    program = build_program(capture(model, batch))
    plans = [plan_of(program, random_decisions(program, (2,), seed, 0.5), literals_of(batch)) for seed in seeds]
    return [verify(lambda: build(expression), plan).model_dump() for plan in plans]
