"""What the distributed tests run on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch

from tests.plans import plan_of, random_decisions
from trainwright.capture.cached import cached_capture
from trainwright.models import zoo
from trainwright.program.program import build_program
from trainwright.runtime.verification.verify import verify


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
    program = build_program(cached_capture(meta_model, meta_batch))
    literals = {name: value for name, value in meta_batch.items() if not isinstance(value, torch.Tensor)}
    decisions = random_decisions(program, tuple(mesh), seed, recompute, offload=offload)
    plan = plan_of(program, decisions, literals, tier)
    return verify(lambda: zoo.build(model, device="cpu"), plan, dtype=dtype).model_dump()


def offloading_plan(budget_bytes: int) -> dict[str, Any]:
    """Verify the joint plan of a budget on hardware with a quick disk, and add what it moves."""
    import torch.distributed as dist

    import trainwright as tw
    from trainwright.artifacts import Tier

    quick = Tier(write_bytes_per_s=1e12, read_bytes_per_s=1e12)
    hardware = tw.hardware("cpu:2").model_copy(update={"offload": {"disk": quick}})
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        question = {"hardware": hardware, "memory": budget_bytes, "offload": "disk", "time_limit_s": 10.0}
        found = [tw.plan(*zoo.build("gpt2-tiny", n_layer=1, device="meta"), **question).to_json()]
    dist.broadcast_object_list(found, 0)
    plan = tw.Plan.parse(found[0])
    report = tw.verify(lambda: zoo.build("gpt2-tiny", n_layer=1, device="cpu"), plan)
    return report.model_dump() | {"moved_bytes": plan.predicted.moved_bytes}
