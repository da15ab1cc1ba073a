"""Train a planned model with a schedule, an option of its optimizer, and a loss on digits that are held out.

    python examples/schedule.py

Needs scikit-learn for the digits. The first run decays its rate linearly and logs its gradient norms; the second follows the
schedule that is refined by them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import trainwright as tw


def build() -> dict[str, Any]:
    """Return the model with a batch, examples by index, and those that are held out."""
    torch.manual_seed(0)
    data = load_digits()
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return {
        "model": model,
        "batch": (inputs[:64], labels[:64]),
        "loss_fn": nn.CrossEntropyLoss(),
        "dataset": torch.utils.data.TensorDataset(inputs[:1500], labels[:1500]),
        "eval_batch": (inputs[1500:1564], labels[1500:1564]),
    }


def main(num_steps: int = 200) -> list[float]:
    """Train twice and return the held-out loss at the end of each run."""
    parts = build()
    plan = tw.plan(
        parts["model"], parts["batch"], loss_fn=parts["loss_fn"], hardware="cpu:1",
        optimizer="adamw", optimizer_options={"betas": (0.9, 0.95), "weight_decay": 0.1},
    )  # fmt: skip
    found = []
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run.jsonl"
        for settings in (
            {"schedule": "linear", "warmup_steps": num_steps // 20, "metrics": metrics},
            {"schedule": "refined", "norms": metrics},
        ):
            events: list[dict[str, Any]] = []
            tw.train(build, plan, steps=num_steps, lr=3e-3, eval_every=num_steps, on_step=events.append, **settings)
            found.append(events[-1]["eval_loss"])
            print(f"{settings['schedule']:8} loss {events[-1]['loss']:.4f}  held out {found[-1]:.4f}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
