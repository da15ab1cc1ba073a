"""A training script of two pipeline stages: the user's own loop, of which the clipping alone differs from one without stages.

    trainwright plan zoo:llama-tiny --batch-size 8 --hardware cpu:2 --pipeline 2 --mesh 1 --micro-batches 4 -o staged.json
    torchrun --nproc-per-node 2 examples/pipeline_loop.py staged.json runs/staged

`backward()` after the call hands the gradients over that the stages' schedule has made; the loss is on every rank. Run it again
and it goes on where it was, under other cuts, orders and numbers of stages, too, or under a plan without any.
"""

from __future__ import annotations

import sys

import torch
from plain_loop import Counting, say
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.launch import process_group
from trainwright.runtime import Checkpointer

NUM_STEPS, SAVE_EVERY = 12, 4


def main(plan_path: str, folder: str) -> None:
    """Train for `NUM_STEPS` updates in all, however often the script is started."""
    plan = tw.Plan.from_json(plan_path)
    torch.manual_seed(0)
    model, _ = tw.zoo.build("llama-tiny", device="cpu")
    model = tw.parallelize(model, plan, seed=0)  # this rank's stage of it
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_set = Counting(8 * NUM_STEPS)
    loader = DataLoader(train_set, batch_sampler=plan.sampler(train_set, seed=0))
    with Checkpointer(folder, model, optimizer) as checkpointer:
        last = checkpointer.load_latest()
        first = 0 if last is None else last + 1
        for step, batch in enumerate(loader):
            if not first <= step < NUM_STEPS:
                continue
            optimizer.zero_grad()
            loss = model(**plan.shard_batch(batch)).loss  # all forwards and backwards, in the order of the schedule
            loss.backward()
            norm = tw.clip_grad_norm_(model, 1.0)  # torch's own sees one stage's gradients
            optimizer.step()
            if (step + 1) % SAVE_EVERY == 0:
                checkpointer.save(step)
            say(f"step {step}  loss {loss.item():.6f}  norm {norm.item():.6f}")


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:])
