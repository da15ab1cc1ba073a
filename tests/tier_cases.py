"""Trains a small model with a tier, of disks or of the host, and compares runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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


class Block(nn.Module):
    """A residual map with parameters of many sizes, some of which are gathered together and some summed whole."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model_of(seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a few blocks of random sizes, of which plans are made in seconds, and a batch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, inner = rng.choice([48, 64, 97]), rng.choice([128, 255])
    model = nn.Sequential(*(Block(width, inner) for _ in range(rng.choice([2, 3]))))
    return model, (torch.randn(rng.choice([4, 32, 128]), width),)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def blocks_of(plan: Plan, tier: TierOptions | None, seed: int) -> tuple[Any, Callable[[], None]]:
    """Return the planned module of `model_of(seed)`, and its step."""
    model, batch = model_of(seed)
    module = tw.parallelize(model, plan, seed=3, loss_fn=loss_fn, tier=tier).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    if module.tier is not None:
        module.tier.attach(optimizer)
    part = plan.shard_batch(batch)

    def step() -> None:
        optimizer.zero_grad()
        module(*part).loss.backward()
        optimizer.step()

    return module, step


def follows_its_plan(plan: str, folder: str | None = None, seed: int | None = None) -> list[bool]:
    """Train with the plan on this rank's part; is it bit-equal to memory, are the bytes its own plan's, at most the fullest's?

    seed: of the blocks that the plan is for; None: it is for gpt2.
    """
    parsed = Plan.parse(plan)
    assert parsed.tier is not None

    def made(plan: Plan, tier: TierOptions | None) -> tuple[Any, Callable[[], Any]]:
        if seed is not None:
            return blocks_of(plan, tier, seed)
        module, optimizer = module_of(plan, tier)
        steps = itertools.count()
        return module, lambda: take_steps(module, optimizer, range(step := next(steps), step + 1))

    module, step = made(parsed, None if folder is None else TierOptions([folder], store=SMALL))
    step()
    step()
    module.tier.told()
    step()
    told = module.tier.told()
    moved = told["tier_read_bytes"] == told["tier_planned_read_bytes"] <= parsed.tier.read_bytes
    moved &= told["tier_write_bytes"] == told["tier_planned_write_bytes"] <= parsed.tier.written_bytes
    in_memory, step = made(parsed.in_memory(), None)
    for _ in range(3):
        step()
    equal = same(weights_of(module), weights_of(in_memory))
    module.tier.close()
    return [equal, moved]
