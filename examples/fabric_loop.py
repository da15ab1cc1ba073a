"""A loop of Lightning Fabric around a planned model: a strategy of a few lines says that it is distributed already.

    trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
    torchrun --nproc-per-node 2 examples/fabric_loop.py plan.json runs/a

Fabric brings devices, precision, clipping, logging on rank 0; layout, gradients and data are the plan's. Leave saving to
`Checkpointer`: `fabric.save` would write rank 0's part alone.
"""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from plain_loop import Counting
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.launch import process_group
from trainwright.runtime import Checkpointer

ACCUMULATE = 2


class PlannedStrategy(DDPStrategy):
    """Processes, groups and reductions as for data parallelism; the module's gradients are the plan's own."""

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


def main(plan_path: str, folder: str, num_epochs: int = 2) -> None:
    """Train for some epochs, and save."""
    plan = tw.Plan.from_json(plan_path)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=plan.num_ranks, strategy=PlannedStrategy())
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    planned = tw.parallelize(model, plan, seed=0)
    adamw = torch.optim.AdamW(planned.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(planned, adamw)

    train_set = Counting(32)
    loader = DataLoader(
        train_set, batch_sampler=plan.sampler(train_set, seed=0)
    )  # not set up: its rows are this rank's
    with Checkpointer(folder, planned, adamw) as checkpointer:
        step = 0
        for _ in range(num_epochs):
            for number, batch in enumerate(loader, start=1):
                loss = model(**plan.shard_batch(batch)).loss
                fabric.backward(loss / ACCUMULATE)
                if number % ACCUMULATE == 0:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    fabric.print(f"loss {loss.item():.6f}", flush=True)
                    step += 1
        checkpointer.save(step - 1)


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:3])
