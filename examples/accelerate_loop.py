"""A loop of Hugging Face Accelerate around a planned model: `PlannedAccelerator(plan)` is what differs.

trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
torchrun --nproc-per-node 2 examples/accelerate_loop.py plan.json
"""

from __future__ import annotations

import sys

import torch
from plain_loop import Counting
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.integrations.accelerate import PlannedAccelerator

ACCUMULATE = 2


def main(plan_path: str, num_epochs: int = 2) -> None:
    """Train for some epochs."""
    accelerator = PlannedAccelerator(
        plan_path, cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE, seed=0
    )
    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Counting(32), batch_size=2, shuffle=True)  # times two processes: the plan's 4
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(num_epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.print(f"loss {loss.item():.6f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
