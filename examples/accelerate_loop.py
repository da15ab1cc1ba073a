"""A loop of Hugging Face Accelerate around a planned model.

    trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
    torchrun --nproc-per-node 2 examples/accelerate_loop.py plan.json

Accelerate brings the loop's conveniences (accumulation, clipping, tracking); layout, gradients and data are the plan's, so
model and loader are not prepared for DDP: the module says that it is prepared, the loader is left out.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from plain_loop import Counting
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.launch import process_group

ACCUMULATE = 2


def main(plan_path: str, num_epochs: int = 2) -> None:
    """Train for some epochs."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE)
    plan = tw.Plan.from_json(plan_path)
    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    model = tw.parallelize(model, plan, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer = accelerator.prepare(model, optimizer)

    train_set = Counting(32)
    loader = DataLoader(train_set, batch_sampler=plan.sampler(train_set, seed=0))
    for _ in range(num_epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**plan.shard_batch(batch)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
                accelerator.print(f"loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
