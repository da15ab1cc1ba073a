"""Workers that average their parameters every eighth step, as a script: alone, or on as many processes as torchrun starts.

    python examples/sync_local_sgd.py
    torchrun --standalone --nproc-per-node 2 examples/sync_local_sgd.py diloco

The argument is a method of `trainwright sync`, local-sgd unless given. The loop is an ordinary one: `sync.step(loss)` stands where
`optimizer.step()` stood, and the state of the method is saved beside model and optimizer.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import trainwright as tw
from trainwright.launch import process_group, rank, world_size

NUM_STEPS, BATCH_SIZE = 64, 16
OPTIONS = {"local-sgd": {"period": 8}, "diloco": {"period": 16}, "easgd": {"period": 8}}


def examples_of(worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's own data: it sees classes in other proportions than the others do."""
    generator = torch.Generator().manual_seed(100 + worker)
    inputs = torch.randn(256, 10, generator=generator)
    inputs[:, worker % 3] += 0.5
    return inputs, inputs[:, :3].argmax(1)


def main(method: str = "local-sgd") -> float:
    """Train, and return the loss over the data of all workers."""
    torch.manual_seed(0)  # all workers begin with the same parameters
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = tw.sync.create(method, model, optimizer, **OPTIONS.get(method, {}))
    inputs, labels = examples_of(rank())
    generator = torch.Generator().manual_seed(rank())
    for _ in range(NUM_STEPS):
        rows = torch.randint(len(inputs), (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        sync.step(loss)
    sent = sync.traffic.sent_bytes
    sync.finish()  # the same parameters on all
    data = [examples_of(worker) for worker in range(world_size())]
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y).item() for x, y in data]
    found = sum(losses) / len(losses)
    if rank() == 0:
        print(f"{method} on {world_size()}: loss {found:.4f}, {sent} bytes sent by rank 0 in {NUM_STEPS} steps")
    return found


if __name__ == "__main__":
    with process_group("cpu"):
        main(*sys.argv[1:2])
