"""One rank of `slow_links`: a classifier on scikit-learn's digits, by each method, and what a round takes beside its price."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainwright import sync
from trainwright.launch import process_group, rank, world_size
from trainwright.sync import Network

GOAL, MOST_STEPS, BATCH, EVERY = 0.25, 400, 32, 10
SGD, ADAM = {"lr": 0.05, "momentum": 0.9}, {"lr": 3e-3}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-parallel": ("sgd", {}),
    "data-parallel, AdamW": ("adamw", {}),
    "local-sgd": ("sgd", {"period": 8}),
    "diloco": ("adamw", {"period": 20}),
    "streaming-diloco": ("adamw", {"period": 20, "fragments": 4, "delay": 1, "mix": 0.5}),
    "easgd": ("sgd", {"period": 8}),
    "lsgd": ("sgd", {"group_period": 4, "global_period": 8, "num_groups": 2}),
    "decentlam": ("sgd", {}),
    "gossip": ("sgd", {}),
    "1-bit-adam": ("adamw", {"freeze_step": 30}),
    "1-bit-lamb": ("adamw", {"freeze_step": 30}),
}


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's share of the training examples, and those held out by all."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return x[400 + rank() :: world_size()], y[400 + rank() :: world_size()], x[:400], y[:400]


def trained(title: str, mbit: float, seed: int) -> dict[str, Any]:
    """Train until the mean of all workers' parameters would do, or for `MOST_STEPS`; that check is no part of the seconds."""
    name = title.partition(",")[0]
    kind, options = METHODS[title]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = (
        torch.optim.SGD(model.parameters(), **SGD) if kind == "sgd" else torch.optim.AdamW(model.parameters(), **ADAM)
    )
    joined = sync.create(name, model, optimizer, **options)
    inputs, labels, held_x, held_y = data()
    generator = torch.Generator().manual_seed(100 * seed + rank())
    dist.barrier()
    spent_s, steps, loss = 0.0, 0, float("inf")
    while loss > GOAL and steps < MOST_STEPS:
        began_s = time.perf_counter()
        for _ in range(EVERY):
            rows = torch.randint(len(inputs), (BATCH,), generator=generator)
            optimizer.zero_grad()
            own = cross_entropy(model(inputs[rows]), labels[rows])
            own.backward()
            joined.step(own)
        spent_s += time.perf_counter() - began_s
        steps += EVERY
        loss = _loss_of_mean(model, held_x, held_y)
    sent = torch.tensor([joined.traffic.sent_bytes])
    dist.all_reduce(sent)
    return {
        "method": title,
        "reached": loss <= GOAL,
        "steps": steps,
        "KiB sent by all": int(sent) / 1024,
        "seconds": spent_s,
        "loss": loss,
    }


def _loss_of_mean(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The held-out loss at the mean of all workers' parameters, which nobody takes over."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    total = flat.clone()
    dist.all_reduce(total)
    nn.utils.vector_to_parameters(total / world_size(), model.parameters())
    with torch.no_grad():
        found = float(cross_entropy(model(x), y))
    nn.utils.vector_to_parameters(flat, model.parameters())
    return found


def round_seconds(name: str, mbit: float, options: dict[str, Any], steps: int = 6) -> dict[str, Any]:
    """Measure a step that exchanges and computes nothing, beside the seconds that the record predicts."""
    model = nn.Linear(256, 256)
    optimizer = (
        torch.optim.AdamW(model.parameters())
        if name.startswith("1-bit")
        else torch.optim.SGD(model.parameters(), lr=0.0)
    )
    for param in model.parameters():
        nn.init.zeros_(param)
        param.grad = torch.ones_like(param)
    joined = sync.create(name, model, optimizer, **options)
    taken = []
    for _ in range(steps):
        dist.barrier()
        began_s = time.perf_counter()
        joined.step(torch.zeros(()))
        own = torch.tensor([time.perf_counter() - began_s])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        taken.append(float(own))
    later = taken[2:]
    record, network = joined.record, Network(0.0, mbit * 1e6 / 8)
    predicted = (
        record.exchange_s(joined.size, network, 0.0, steps)
        if name != "1-bit-adam"
        else _late(record, joined.size, network)
    )
    measured = statistics.median(later)
    return {"method": name, "predicted s": predicted, "measured s": measured, "off": measured / predicted - 1}


def _late(record: Any, size: Any, network: Network) -> float:
    """The step from which 1-bit methods send signs alone: earlier steps are not measured."""
    return record.messages[0].seconds_on(size, network, 0.0)


ROUNDS: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "local-sgd": {"period": 1},
    "diloco": {"period": 1},
    "lsgd": {"group_period": 1, "global_period": 1},
    "gossip": {},
    "1-bit-adam": {"freeze_step": 2},
}


def main(mbit: str, what: str) -> None:
    torch.set_num_threads(1)
    with process_group("cpu"):
        if what == "rounds":
            rows = [round_seconds(name, float(mbit), options) for name, options in ROUNDS.items()]
        else:
            rows = [trained(title, float(mbit), seed=0) for title in METHODS]
        if rank() == 0:
            print("ROWS " + json.dumps(rows), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
