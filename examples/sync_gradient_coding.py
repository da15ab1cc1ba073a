"""Gradient descent that does not wait for stragglers, simulated: six workers, one twelve times as slow.

    python examples/sync_gradient_coding.py [sr-sgc]

With `gradient-coding` every step has the whole gradient from those who answer in time. With `sr-sgc` two models train in turn,
for less work a worker. On real ranks the same functions run under torchrun by `tw.sync.create` and `sync.step(loss_of)`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import trainwright as tw
from trainwright.sync import Network, Steps, simulate

NUM_WORKERS, NUM_STEPS = 6, 24
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient-coding": {"stragglers": 2},
    "sr-sgc": {"burst": 1, "window": 2, "most": 2, "models": 2, "jobs": NUM_STEPS},
    "uncoded": {"stragglers": 0},
}
X = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()


def worker(name: str) -> Steps[tuple[float, float]]:
    """Train as one worker or the master; returns the loss of the first model, and the seconds on the clock."""
    torch.manual_seed(0)
    models = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
    model = models if name == "sr-sgc" else models[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    method = name.replace("uncoded", "gradient-coding")
    sync = yield from tw.sync.join(method, model, optimizer, patience=0.5, **OPTIONS[name])
    num_chunks = sync.method.num_chunks

    def loss_of(chunk: int, job: int = 1) -> torch.Tensor:
        rows = slice(chunk * len(X) // num_chunks, (chunk + 1) * len(X) // num_chunks)
        return (models[(job - 1) % 2](X[rows]) - Y[rows]).square().sum() / len(X)

    for _ in range(NUM_STEPS + getattr(sync.method, "delay", 0)):
        yield from sync.steps(loss_of)
    ended_s = yield tw.sync.Now()
    yield from sync.finishing()
    with torch.no_grad():
        return (models[0](X) - Y).square().mean().item(), ended_s


def main(name: str = "gradient-coding") -> dict[str, float]:
    """Train with the code and without; returns the master's seconds of each."""
    seconds = {}
    for each in (name, "uncoded"):
        paces = [12.0] + [1.0] * (NUM_WORKERS - 1)
        run = simulate([worker(each) for _ in range(NUM_WORKERS + 1)], Network(1e-3, 1e8), [0.0, *paces])
        loss, seconds[each] = run.results[0]
        print(f"{each}: loss {loss:.4f}, {seconds[each]:.1f} s on the clock")
    return seconds


if __name__ == "__main__":
    main(*sys.argv[1:2])
