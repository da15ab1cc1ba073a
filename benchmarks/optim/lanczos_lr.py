"""`LanczosLR` against constant rates: one network on digits, batches of 1 to 256, three seeds.

    python -m benchmarks.optim.lanczos_lr        # five minutes on one core

Every run takes the same number of steps. The constant rates are a grid; the table shows the best of them for each batch size,
which takes a search, and the rules, which take none. What measuring costs is counted in gradients of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainwright.schedules import LanczosLR

from ..solvers.record import write

BATCH_SIZES, SEEDS, NUM_STEPS = (1, 2, 8, 32, 256), (0, 1, 2), 400
GRID = (0.03, 0.1, 0.3, 1.0)
RULES: dict[str, dict[str, Any]] = {
    "LanczosLR, defaults": {},
    "LanczosLR, safety 0.5": {"safety": 0.5},
    "LanczosLR, heavy-ball": {"rule": "heavy-ball"},
    "LanczosLR, polyak": {"rule": "polyak"},
}
GRADIENTS_PER_PRODUCT = 2


def losses(batch_size: int, seed: int, lr: float = 0.1, rule: dict[str, Any] | None = None) -> tuple[float, float, int]:
    """Train once and return the loss on the training data, the accuracy on held-out digits, and the number of measurements."""
    data = load_digits()
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = None if rule is None else LanczosLR(optimizer, **rule)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_STEPS):
        rows = torch.randint(0, 1500, (batch_size,), generator=generator)
        if schedule is not None and schedule.due:
            schedule.measure(lambda rows=rows: cross_entropy(model(inputs[rows]), labels[rows]))
        optimizer.zero_grad()
        cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    with torch.no_grad():
        loss = cross_entropy(model(inputs[:1500]), labels[:1500]).item()
        accuracy = (model(inputs[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    return loss, accuracy, 0 if schedule is None else schedule.num_measured


def row(name: str, runs: list[tuple[float, float, int]]) -> dict[str, Any]:
    """Return one line of the table."""
    loss, accuracy = (sum(run[k] for run in runs) / len(runs) for k in (0, 1))
    cost = 1 + runs[0][2] * 10 * GRADIENTS_PER_PRODUCT / NUM_STEPS
    return {
        "rate": name,
        "training loss": round(loss, 3),
        "held-out accuracy": round(accuracy, 3),
        "gradients": round(cost, 2),
    }


def rows(batch_size: int) -> list[dict[str, Any]]:
    """Return the best two constant rates and every rule."""
    grid = {lr: [losses(batch_size, seed, lr) for seed in SEEDS] for lr in GRID}
    order = sorted(GRID, key=lambda lr: sum(run[0] for run in grid[lr]))
    found = [row(f"constant {lr}, no. {place} of {len(GRID)}", grid[lr]) for place, lr in enumerate(order[:2], 1)]
    return found + [row(name, [losses(batch_size, seed, rule=rule) for seed in SEEDS]) for name, rule in RULES.items()]


def main() -> None:
    """Run all and write the record."""
    write(
        "schedules-lanczos",
        {f"batches of {batch_size}": rows(batch_size) for batch_size in BATCH_SIZES},
        [
            f"A perceptron 64–64–64–10 on scikit-learn's digits, SGD, {NUM_STEPS} steps, mean of {len(SEEDS)} seeds.",
            f"*gradients*: of a batch, a step; a Hessian-vector product counts as {GRADIENTS_PER_PRODUCT}.",
            "`polyak` is for deterministic gradients: it is listed to show what the noise of batches makes of it.",
        ],
        ["scikit-learn"],
    )


if __name__ == "__main__":
    main()
