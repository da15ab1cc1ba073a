"""Functions that the tests of experts run on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from tests.models.experts import build
from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Refusal
from trainwright.capture.export import as_batch, capture
from trainwright.models import zoo
from trainwright.ops.experts import NAME
from trainwright.planner.costs.simulate import simulate
from trainwright.profiler.kernels.allocator import measure, static_bytes
from trainwright.program.groups import Group
from trainwright.program.plan_text import decisions_of
from trainwright.program.program import Program, build_program
from trainwright.runtime.module import parallelize
from trainwright.runtime.training.train import train_loop, train_step
from trainwright.runtime.verification.verify import verify


def expert_groups(program: Program) -> list[Group]:
    """The groups that run experts."""
    return [g for c in program.classes for g in c.groups if any(op.name == NAME for op in g.ops)]


def forced(family: str, mesh: list[int], split: list[str], seed: int, **settings: Any) -> dict[str, Any]:
    """Verify a plan drawn from the whole space but for the experts' split, in float64; an unknown loop is an error."""
    model, batch = build(family, device="meta", **settings)
    program = build_program(capture(model, batch))
    decisions = random_decisions(program, tuple(mesh), seed)
    for group in expert_groups(program):
        names = [loop.name for loop in group.loops]
        decisions.splits[group] = tuple(names.index(name) if name != "-" else -1 for name in split)
    return verify(lambda: build(family, **settings), plan_of(program, decisions), dtype="float64").model_dump()


def peaks(model: str, plan: str) -> dict[str, Any]:
    """Return the peak of a rank's allocator over two steps, the promised one, and the promise for the rows that it was sent."""
    parsed, make = tw.Plan.parse(plan), lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False)
    built, batch = zoo.build(model, device="cpu")
    module = parallelize(built, parsed).train()
    del built
    optimizer, part = make(module.parameters()), parsed.shard_batch(as_batch(batch))
    static, counts = static_bytes(module), []

    def step() -> None:
        train_step(module, optimizer, part)
        counts.append({key: seen.numbers for key, seen in module.communicator.routed.clear().items()})

    with module.communicator.settling():
        measured = static + measure(step, num_steps=2).peak_delta_bytes
    program = build_program(capture(*zoo.build(model, device="meta")))
    chosen, coords = decisions_of(program, parsed), module.communicator.coords

    def simulated(rows: dict[str, list[int]] | None) -> int:
        unnamed = lambda named: make([param for _, param in named])  # noqa: E731
        return simulate(program, chosen, unnamed, coords=coords, num_threads=1, counts=rows).peak_bytes

    # the first step begins without optimizer states: the second one's rows are those of the peak
    return {"measured": measured, "promised": simulated(None), "known": simulated(counts[-1]), "counts": counts}


def skewed(plan: str, policy: str) -> dict[str, Any]:
    """Train three steps with a router that sends every token to the first rank's experts; what was told, or refused."""
    parsed = tw.Plan.parse(plan)
    model, batch = zoo.build("gpt-oss-tiny", device="cpu")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias[:2] += 50.0
    module = parallelize(model, parsed).train()
    before = {name: param.to_local().clone() for name, param in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    told: list[dict[str, Any]] = []
    try:
        train_loop(module, optimizer, [batch] * 3, steps=3, on_step=told.append, on_imbalance=policy)
    except Refusal as refusal:
        same = all(torch.equal(param.to_local(), before[name]) for name, param in module.named_parameters())
        return {"refused": str(refusal), "same": same, "rank": dist.get_rank()}
    return {"factors": [event["expert_imbalance"] for event in told]}
