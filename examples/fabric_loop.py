"""A loop of Lightning Fabric around a planned model: the strategy is what differs.

trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
torchrun --nproc-per-node 2 examples/fabric_loop.py plan.json runs/a
"""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from plain_loop import Counting
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.integrations.fabric import PlannedStrategy

ACCUMULATE = 2


def main(plan_path: str, folder: str, num_epochs: int = 2) -> None:
    """Train for some epochs, and save."""
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=2, strategy=PlannedStrategy(plan_path, seed=0))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = fabric.setup_dataloaders(DataLoader(Counting(32), batch_size=2, shuffle=True))
    for epoch in range(num_epochs):
        for number, batch in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(**batch).loss
                fabric.backward(loss / ACCUMULATE)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                fabric.print(f"loss {loss.item():.6f}", flush=True)
        fabric.save(folder, {"model": model, "optimizer": optimizer, "epoch": epoch})


if __name__ == "__main__":
    main(*sys.argv[1:3])
