"""What the distributed tests run on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch

from tests.plans import plan_of, random_decisions
from trainwright.capture import zoo
from trainwright.capture.export import capture
from trainwright.capture.program import build_program
from trainwright.runtime.verify import verify


def random_plan(
    model: str,
    mesh: list[int],
    seed: int,
    recompute: float = 0.5,
    dtype: str = "float64",
    offload: float = 0.0,
    tier: str = "disk",
) -> dict[str, Any]:
    """Verify a plan drawn from the whole strategy space."""
    meta_model, meta_batch = zoo.build(model, device="meta")
    program = build_program(capture(meta_model, meta_batch))
    literals = {name: value for name, value in meta_batch.items() if not isinstance(value, torch.Tensor)}
    decisions = random_decisions(program, tuple(mesh), seed, recompute, offload=offload)
    plan = plan_of(program, decisions, literals, tier)
    return verify(lambda: zoo.build(model, device="cpu"), plan, dtype=dtype).model_dump()
