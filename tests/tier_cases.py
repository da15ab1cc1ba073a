"""Trains a small model with a tier, of disks or of the host, and compares runs."""

from __future__ import annotations

from typing import Any

import torch

import trainwright as tw
from trainwright.artifacts import Plan
from trainwright.runtime import TierOptions
from trainwright.tiers import StoreOptions
from trainwright.training import made, optimizer_of

SMALL = StoreOptions(chunk_bytes=16384, buffer_bytes=8 * 16384)
LR = 1e-2


def gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    return tw.load_model("zoo:gpt2-tiny", device="cpu", batch_size=4, seq_len=16, seed=0, **options)


def module_of(plan: Plan, tier: TierOptions | None) -> tuple[Any, torch.optim.Optimizer]:
    loaded = gpt2()
    module = tw.parallelize(loaded.model, plan, seed=3, tier=tier).train()
    chosen, _ = optimizer_of(plan, model=loaded.model)
    optimizer = made(chosen, module, LR)
    if module.tier is not None:
        module.tier.attach(optimizer)
    return module, optimizer


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def take_steps(module: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(**module.plan.shard_batch(like(module.plan, batch_of(step)))).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def like(plan: Plan, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: batch.get(name, torch.ones(entry.shape, dtype=torch.long)) for name, entry in plan.batch.items()}


def run(plan: Plan, tier: TierOptions | None, num_steps: int) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    module, optimizer = module_of(plan, tier)
    losses = take_steps(module, optimizer, range(num_steps))
    return losses, weights_of(module), module


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    if module.tier is None:
        return tw.full_state_dict(module)
    with module.tier.whole():
        return {name: value.clone() for name, value in tw.full_state_dict(module).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def away(plan: Plan, what: str) -> set[str]:
    return {key for key, param in plan.params.items() if what in param.offloaded}


def follows_its_plan(plan: str, folder: str | None = None) -> list[bool]:
    """Train with the plan on this rank's part; is it bit-equal to memory, are the bytes its own plan's, at most the fullest's?"""
    parsed = Plan.parse(plan)
    assert parsed.tier is not None
    module, optimizer = module_of(parsed, None if folder is None else TierOptions([folder], store=SMALL))
    take_steps(module, optimizer, range(2))
    module.tier.told()
    take_steps(module, optimizer, range(2, 3))
    told = module.tier.told()
    moved = told["tier_read_bytes"] == told["tier_planned_read_bytes"] <= parsed.tier.read_bytes
    moved &= told["tier_write_bytes"] == told["tier_planned_write_bytes"] <= parsed.tier.written_bytes
    equal = same(weights_of(module), run(parsed.in_memory(), None, 3)[1])
    module.tier.close()
    return [equal, moved]
