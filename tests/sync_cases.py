"""One small training run a sync method, as a program that real ranks and the simulator run alike."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import sync
from trainwright.launch import init
from trainwright.sync import Compute, Identify, Ranks, Receive, Send, Steps, Sync
from trainwright.sync.ranks import AWAITING

STEPS = 12


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.01)


@dataclass(frozen=True)
class Case:
    """options: for the battery's short runs. equal_every: steps after which all workers hold the same; 0: never."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    equal_every: int = 0
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    num_steps: int = STEPS


CASES = {
    case.name: case
    for case in (
        Case("data-parallel", equal_every=1),
        Case("local-sgd", {"period": 3, "shared_steps": 3}, equal_every=3),
        Case("powersgd", {"start_step": 3, "min_compression_rate": 0.5}, equal_every=1),
        Case("post-local-sgd", {"period": 3, "shared_steps": 4}),
        Case("diloco", {"period": 4}, adam, equal_every=4),
        Case("streaming-diloco", {"period": 6, "fragments": 3, "delay": 1}, adam),
        Case("gossip", {"graph": "one-peer"}, adam),
        Case("atc-dsgd", {"graph": "path"}),
        Case("dmsgd"),
        Case("decentlam", {"graph": "star"}),
        Case("easgd", {"period": 3}),
        Case("lsgd", {"group_period": 2, "global_period": 4, "num_groups": 2}, sizes=(2, 4, 8)),
        Case("cr-psgd", {"growth": 1.5, "budget": 60}, equal_every=1),
        Case("cr-psgd-catalyst", {"growth": 1.5, "budget": 100}, equal_every=1),
        Case("1-bit-adam", {"freeze_step": 4}, adam, equal_every=1),
        Case("1-bit-lamb", {"freeze_step": 4}, adam, equal_every=1),
        Case("sa-srrw", {"graph": "complete"}, plain, sizes=(2, 4, 8)),
        # With patience all are waited for: which workers answer first, hence the last bits, would else hang on the machine.
        Case("gradient-coding", {"stragglers": 2, "patience": float("inf")}, sizes=(4,)),
        Case("sr-sgc", {"most": 2, "patience": float("inf")}, sizes=(4,)),
        Case("m-sgc", {"burst": 1, "window": 2, "patience": float("inf"), "jobs": 10}, sgd, sizes=(4,)),
        Case("dadao", {"smoothness": 20.0, "convexity": 1.0}, plain, sizes=(2, 4, 8), num_steps=8),
        Case("just-one-byte", {"num_samples": 3}, plain, equal_every=1),
    )
}


def net(seed: int = 0) -> nn.Module:
    """Seventeen parameters and ten, so that nothing divides evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Draw the batch of worker `rank`, whose data differ from the others'."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :3].roll(rank, 1) + rank


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def program(
    name: str, num_steps: int = 0, begin: dict[str, Any] | None = None, **options: Any
) -> Steps[tuple[Sync, dict[str, Any]]]:
    """Train from the start, or from what another run returned, to `num_steps` in all."""
    case = CASES[name]
    model = net()
    optimizer = case.optimizer(model.parameters())
    joined = yield from sync.join(name, model, optimizer, **{**case.options, **options})
    if begin is not None:
        model.load_state_dict(begin["model"])
        optimizer.load_state_dict(begin["optimizer"])
        assert joined.load_state_dict(begin["sync"]) == ()
    digests = []
    for step in range(joined.method.num_steps, num_steps or case.num_steps):
        yield from one_step(joined, model, optimizer, step)
        digests.append(digest(joined))
    # A model's state_dict shares its memory; an optimizer's does too.
    held = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sync": joined.state_dict(),
        "digests": digests,
    }
    return joined, held


def one_step(joined: Sync, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Steps[None]:
    rank = joined.method.worker.rank
    if joined.record.takes == "closure":
        yield from joined.steps(lambda sample=0, job=step: loss_of(model, rank, 100 * job + sample))
        return
    optimizer.zero_grad()
    loss = loss_of(model, rank, step)
    loss.backward()
    yield Compute()
    yield from joined.steps(loss)


def digest(joined: Sync) -> str:
    return joined.method.replica.digest().hex()


def on_ranks(names: list[str]) -> dict[str, Any]:
    """On the ranks of a pool: each method's digest and bytes."""
    found = {}
    for name in names:
        engine = Ranks()
        joined, _ = engine.run(program(name))
        engine.close()
        found[name] = [
            digest(joined),
            engine.traffic.sent_bytes,
            joined.record.sent_bytes(joined.size, joined.method.num_steps),
        ]
    return found


def left_over() -> list[float]:
    """Rank 1 sends more than rank 0 takes, rank 0 asks for more than rank 1 sends; `close` settles both, and all goes on."""

    def talk() -> Steps[float]:
        place = yield Identify()
        like = torch.zeros(50_000, dtype=torch.float64)  # more than a socket holds
        if place.rank == 1:
            for number in range(3):
                yield Send(like + number, 0, 7)
            return -1.0
        if place.rank == 0:
            first = yield Receive(like, 1, 7)
            assert (yield Receive(like, None, 8, within_s=0.0)) is None
            assert (yield Receive(like, 1, 9, within_s=0.0)) is None
            return float(first.tensor[0])
        return -1.0

    found = []
    for _ in range(2):
        engine = Ranks()
        found.append(engine.run(talk()))
        engine.close()
        assert all(thread.name != AWAITING for thread in threading.enumerate())
    return found


def finishes() -> None:
    """Train by a method that leaves messages under way, and end after `finish`, as a user's script does."""
    init("cpu")
    model = net()
    joined = sync.create("gradient-coding", model, plain(model.parameters()), stragglers=1, patience=0.0)
    for step in range(4):
        joined.step(lambda chunk, step=step: loss_of(model, chunk, step))
    joined.finish()
    # One write a line: torchrun runs Python unbuffered, where `print` writes a line's parts one by one among the others'.
    sys.stdout.write(f"finished {joined.method.replica.digest().hex()}\n")


if __name__ == "__main__":
    finishes()
