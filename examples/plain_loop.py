"""A whole training script: a DataLoader, a schedule, accumulation, clipping, validation, and checkpoints to go on from.

    trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
    torchrun --nproc-per-node 2 examples/plain_loop.py plan.json runs/a

Run it again and it goes on where it was; on other ranks, too, with a plan for those. What a plan changes is marked.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.launch import process_group, rank
from trainwright.runtime import Checkpointer

NUM_STEPS, ACCUMULATE, SAVE_EVERY = 12, 2, 4


class Counting(Dataset):
    """Sequences that count upwards, which a small model learns at once."""

    def __init__(self, num_examples: int, length: int = 32) -> None:
        self.num_examples, self.length = num_examples, length

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.length) + 7 * index) % 200
        return {"input_ids": ids, "labels": ids}


def main(plan_path: str, folder: str) -> None:
    """Train for `NUM_STEPS` updates in all, however often the script is started."""
    plan = tw.Plan.from_json(plan_path)
    torch.manual_seed(0)
    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    model = tw.parallelize(model, plan, seed=0)  # changed: this rank's part of it
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=NUM_STEPS)

    train_set = Counting(100)
    sampler = plan.sampler(train_set, seed=0)  # changed: this rank's rows
    loader = DataLoader(train_set, batch_sampler=sampler)
    valid_set = plan.padded(Counting(6))  # changed: the last batch is filled with what has no weight
    valid = DataLoader(valid_set, batch_sampler=plan.sampler(valid_set, shuffle=False, last="pad"))

    with Checkpointer(folder, model, optimizer, scheduler=schedule, sampler=sampler) as checkpointer:
        last = checkpointer.load_latest()
        batches = endless(loader)
        for step in range(0 if last is None else last + 1, NUM_STEPS):
            model.train()
            optimizer.zero_grad()
            for _ in range(ACCUMULATE):
                loss = model(**plan.shard_batch(next(batches))).loss / ACCUMULATE  # changed
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if (step + 1) % SAVE_EVERY == 0:
                checkpointer.save(step, num_batches=(step + 1) * ACCUMULATE)
            say(f"step {step}  loss {loss.item() * ACCUMULATE:.6f}  lr {schedule.get_last_lr()[0]:.6f}")
    model.eval()
    with torch.no_grad():
        losses = [model(**plan.shard_batch(batch)).loss.item() for batch in valid]
    say(f"validation {sum(losses) / len(losses):.6f}")


def endless(loader):
    """Yield batches for ever; the sampler orders each epoch anew."""
    while True:
        yield from loader


def say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:3])
