"""Gradients that travel as two thin matrices, by torch's own hook: alone, or on as many processes as torchrun starts.

torchrun --standalone --nproc-per-node 2 examples/sync_powersgd.py
"""

from __future__ import annotations

import torch
from torch import nn

import trainwright as tw
from trainwright.launch import process_group, rank, world_size

NUM_STEPS, WHOLE_STEPS = 40, 4


def main() -> float:
    """Train, and return the bytes that rank 0 sent over those of an all-reduce in each step."""
    torch.manual_seed(0)  # all workers begin with the same parameters
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    sync = tw.sync.create("powersgd", model, optimizer, rank=2, start_step=WHOLE_STEPS)
    generator = torch.Generator().manual_seed(rank())
    for _ in range(NUM_STEPS):
        x = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        loss.backward()
        sync.step(loss)
    whole = tw.sync.record("data-parallel").sent_bytes(sync.size, NUM_STEPS)
    share = sync.traffic.sent_bytes * world_size() / max(whole, 1)
    sync.finish()
    if rank() == 0:
        print(f"powersgd on {world_size()}: loss {loss.item():.4f}, {share:.0%} of the bytes of data-parallel")
    return share


if __name__ == "__main__":
    with process_group("cpu"):
        main()
