"""A learning rate that nobody chose: SGD on digits, its rate measured from the curvature of its own batches.

    python examples/lanczos_lr.py

Needs scikit-learn for the digits. The rate of a run with another batch size follows without a search.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainwright.schedules import LanczosLR


def main(num_steps: int = 300, batch_size: int = 64) -> float:
    """Train and return the accuracy on the examples that were held out."""
    torch.manual_seed(0)
    data = load_digits()
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LanczosLR(optimizer)
    for step in range(num_steps):
        rows = torch.randint(0, 1500, (batch_size,))
        if schedule.due:  # on a batch of the size that trains
            schedule.measure(lambda rows=rows: cross_entropy(model(inputs[rows]), labels[rows]))
            print(
                f"step {step:3}  lr {optimizer.param_groups[0]['lr']:.3f}  largest curvature {schedule.curvatures[0]:.1f}"
            )
        optimizer.zero_grad()
        cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        accuracy = (model(inputs[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"accuracy on held-out digits {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
