"""Fine-tune a classifier without gradients while its blocks rest on a disk: digits that come transposed.

    python stream_mezo.py --steps 300

It is trained on digits as they are, whole and with AdamW. Then its blocks go to files, of which three are in memory at a
time, and MeZO adapts it to the same digits with rows and columns exchanged. With --check the same steps are taken by MeZO
alone, in memory, and have to give the same bits.
"""

from __future__ import annotations

import argparse
import copy
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import trainwright as tw


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of right answers; a streamed model sees every update."""
    with torch.no_grad():
        return float((model(x).argmax(-1) == y).float().mean())


def main() -> None:
    """Train, exchange rows and columns, fine-tune, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    turned = x.view(-1, 8, 8).transpose(1, 2).reshape(-1, 64)
    model = nn.Sequential(nn.Linear(64, 32), *[Block(32) for _ in range(4)], nn.Linear(32, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        adamw.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        adamw.step()
    print(
        f"as they are {accuracy(model, x[test], y[test]):.3f}, transposed {accuracy(model, turned[test], y[test]):.3f}"
    )
    whole = copy.deepcopy(model)

    def fine_tuned(model: nn.Module) -> None:
        optimizer = tw.optim.MeZO(model.parameters(), lr=asked.lr, epsilon=1e-3, seed=1)
        store = tw.streaming.DiskStore([folder]) if model is not whole else None
        streamed = tw.streaming.Streamed(model, optimizer, store) if store else None
        for step in range(asked.steps):
            some = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(step))[:256]]
            loss = optimizer.step(lambda some=some: nn.functional.cross_entropy(model(turned[some]), y[some]))
            if streamed and (step + 1) % max(1, asked.steps // 5) == 0:
                print(f"step {step + 1}: loss {loss:.3f}, accuracy {accuracy(model, turned[test], y[test]):.3f}")
        if streamed and store:
            streamed.close()
            store.close()

    with tempfile.TemporaryDirectory() as folder:
        fine_tuned(model)
        if asked.check:
            fine_tuned(whole)
            same = all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters()))
            print(f"equal to MeZO in memory, to the bit: {same}")


if __name__ == "__main__":
    main()
