"""Replicas of a plan that exchange by a sync method, in Hugging Face Accelerate: `sync=` beside the plan is what differs.

trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
torchrun --nproc-per-node 4 examples/accelerate_replicas.py plan.json diloco 4     two replicas, each on two processes
"""

from __future__ import annotations

import sys

import torch
from plain_loop import Counting
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.integrations.accelerate import PlannedAccelerator


def main(plan_path: str, method: str = "diloco", period: int = 4, num_epochs: int = 2) -> None:
    """Train for some epochs; each replica takes batches of its own, and they exchange every `period` steps."""
    accelerator = PlannedAccelerator(
        plan_path, sync=method, sync_options={"period": period}, cpu=not torch.cuda.is_available(), seed=0
    )
    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Counting(64), batch_size=2, shuffle=True)  # times the processes of a replica: the plan's batch
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(num_epochs):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # and every so often an exchange with the other replicas
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()  # of all replicas
            accelerator.print(f"loss {mean:.6f}", flush=True)
    accelerator.finish()  # the same parameters on all replicas: those to evaluate or keep
    sync = accelerator.sync
    accelerator.print(
        f"{method}: {sync.num_rounds} rounds, {sync.traffic.sent_bytes} bytes by this process", flush=True
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
