"""Four learning rates of a digits classifier as one fused model, and what each ends at.

python examples/sweep.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import fusion


def main(rates: tuple[float, ...] = (0.3, 0.03, 0.003, 0.0003), epochs: int = 3) -> torch.Tensor:
    """Train a classifier at each rate, all at once; return the last losses."""
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
    models = [nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)) for _ in rates]
    fused = fusion.fuse(models)
    optimizer = fusion.optimizer("adamw", fused, lr=list(rates), clip=1.0)
    for epoch in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            losses = fused.loss(batch, nn.CrossEntropyLoss())
            losses.sum().backward()
            optimizer.step()
        print(f"epoch {epoch}  " + "  ".join(f"lr {rate:g}: {loss:.3f}" for rate, loss in zip(rates, losses.tolist())))
    return losses.detach()


if __name__ == "__main__":
    main()
