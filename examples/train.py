"""An ordinary training script; what a plan changes is marked.

trainwright plan zoo:gpt2-tiny --hardware cpu:2 -o plan.json
torchrun --nproc-per-node 2 examples/train.py plan.json
"""

from __future__ import annotations

import sys

import torch

import trainwright as tw
from trainwright.launch import process_group, rank


def main(plan_path: str, num_steps: int = 20) -> None:
    """Train the model of the plan's command on one batch."""
    plan = tw.Plan.from_json(plan_path)
    model, batch = tw.zoo.build("gpt2-tiny", device="cpu")
    model = tw.parallelize(model, plan)  # changed: this rank's part of it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(**plan.shard_batch(batch)).loss  # changed: this rank's part of the batch
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:2])
