"""Streamed training on ranks, and the same by hand on whole models in one process."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.launch import rank
from trainwright.optim.mezo import MeZO, descend, place
from trainwright.streaming import ByteExchange, Streamed
from trainwright.sync.just_one_byte import decode, encode

STEPS, EPSILON, LR, SEED = 3, 1e-2, 1e-2, 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])


def batch(step: int, of_rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + of_rank))


def optimizer_of(model: nn.Module) -> MeZO:
    return MeZO(model.parameters(), lr=LR, epsilon=EPSILON, seed=SEED, exact=True, weight_decay=0.1)


def streams() -> list[list[float]]:
    """Take the steps on this rank, on batches of its own; return its parameters."""
    model = build()
    streamed = Streamed(model, optimizer_of(model), exchange=ByteExchange())
    for step in range(STEPS):
        x = batch(step, rank())
        streamed.step(lambda x=x: model(x).square().sum())
    return [param.flatten().tolist() for param in streamed.close().parameters()]


def by_hand(num_ranks: int) -> list[list[float]]:
    model = build()
    params = list(model.parameters())
    for step in range(STEPS):
        own = [param.detach().clone() for param in params]
        slopes = []
        for each in range(num_ranks):
            losses = []
            for amount in (EPSILON, -EPSILON):
                for number, (param, value) in enumerate(zip(params, own)):
                    place(param.data, value, (SEED, step, number, 2, each), [amount])
                losses.append(model(batch(step, each)).square().sum().item())
            slopes.append((losses[0] - losses[1]) / (2 * EPSILON))
        shared = decode(encode(torch.tensor(slopes, dtype=torch.float64))).tolist()
        for number, (param, value) in enumerate(zip(params, own)):
            keys = [((SEED, step, number, 2, each), slope / num_ranks) for each, slope in enumerate(shared)]
            descend(value, keys, LR, 0.1, (SEED, step, number, 1))
            param.data.copy_(value)
    return [param.detach().flatten().tolist() for param in params]
