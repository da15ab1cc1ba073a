"""Fine-tuning with sampled activations against full, recomputed and LoRA: bytes kept, time, accuracy.

python -m benchmarks.nn.sampled

Writes benchmarks/results/sampled-activations.{json,md}: a small vision transformer, trained on digits lying on their side, is
tuned on upright ones. Two seeds; bytes by `trainwright.profile`, processor time on one
thread.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trainwright as tw
from trainwright.nn import GradientNorms

RESULTS = Path(__file__).parent.parent / "results"
WIDTH, TOKENS, BATCH, STEPS = 64, 16, 64, 80


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.one(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(4, WIDTH), nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.blocks, self.head, self.recompute = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 10), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x.mean(1))


class LowRank(nn.Module):
    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(inner.in_features, rank, bias=False),
            nn.Linear(rank, inner.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def plain(model: Vision) -> None:
    """Change nothing."""


def recomputed(model: Vision) -> None:
    model.recompute = True


def low_rank(model: Vision) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        for name, each in list(block.named_children()):
            if isinstance(each, nn.Linear):
                setattr(block, name, LowRank(each))
    model.head.requires_grad_(True)


def sampled(budget: float) -> Callable[[Vision], Any]:
    """All but the layer behind attention, whose input attention keeps anyway."""
    return lambda model: tw.sample_activations(model, budget, modules=["*.qkv", "*.up", "*.down"])


WAYS: dict[str, tuple[Callable[[Vision], Any], bool]] = {
    "full": (plain, False),
    "recomputed blocks": (recomputed, False),
    "LoRA, rank 4": (low_rank, False),
    "sampled 0.3": (sampled(0.3), False),
    "sampled 0.3, norms of the last visit": (sampled(0.3), True),
    "sampled 0.1": (sampled(0.1), False),
    "sampled 0.1, norms of the last visit": (sampled(0.1), True),
}


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 8, 8) / 16
    return x, x.transpose(1, 2).flip(1), torch.tensor(labels)[order]


def as_tokens(x: Tensor) -> Tensor:
    return x.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)


def train(model: Vision, x: Tensor, y: Tensor, seed: int, lr: float, by_norms: bool = False) -> float:
    """Train on the first 300; return the processor seconds of a step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)
    table = GradientNorms(model, 300, TOKENS) if by_norms else None
    torch.manual_seed(seed)
    begin = time.process_time()
    for _ in range(STEPS):
        index = torch.randperm(300, generator=generator)[:BATCH]
        optimizer.zero_grad()
        with table.visiting(index) if table is not None else nullcontext():
            F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return (time.process_time() - begin) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    accuracies: dict[str, list[float]] = {name: [] for name in WAYS}
    steps: dict[str, list[float]] = {name: [] for name in WAYS}
    kept: dict[str, Any] = {}
    for seed in range(2):
        upright, lying, labels = digits(seed)
        torch.manual_seed(seed)
        base = Vision()
        train(base, as_tokens(lying), labels, seed, 3e-3)
        x = as_tokens(upright)
        for name, (change, by_norms) in WAYS.items():
            model = copy.deepcopy(base)
            change(model)
            if seed == 0:
                kept[name] = tw.profile(
                    model, (x[:BATCH], labels[:BATCH]), loss_fn=nn.CrossEntropyLoss(), optimizer="adamw"
                )
            steps[name].append(train(model, x, labels, seed, 3e-3 if name.startswith("LoRA") else 1e-3, by_norms))
            accuracies[name].append((model.eval()(x[300:]).argmax(1) == labels[300:]).float().mean().item())
    rows = [
        {
            "way": name, "kept KiB": kept[name].saved_bytes / 1024, "peak KiB": kept[name].peak_bytes / 1024,
            "step / full": statistics.median(steps[name]) / statistics.median(steps["full"]),
            "accuracy": statistics.mean(accuracies[name]), "lowest": min(accuracies[name]), "highest": max(accuracies[name]),
        }
        for name in WAYS
    ]  # fmt: skip
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    head = {"date": date.today().isoformat(), "torch": torch.__version__}
    (RESULTS / "sampled-activations.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    for row in rows:
        lines.append(f"| {' | '.join(f'{each:.3g}' if isinstance(each, float) else each for each in row.values())} |")
    text = (
        f"`python -m benchmarks.nn.sampled`, {head['date']}, torch {head['torch']}, one thread; a vision transformer of width "
        f"{WIDTH}, batches of {BATCH} × {TOKENS} tokens, {STEPS} steps, two seeds; bytes as `trainwright.profile` finds them."
    )
    (RESULTS / "sampled-activations.md").write_text("\n".join(["# Sampled activations", "", text, "", *lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
