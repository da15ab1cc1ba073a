"""Fine-tuning with sampled activations against full, recomputed and LoRA: bytes kept, time, accuracy.

python -m benchmarks.nn.sampled

Writes benchmarks/results/sampled-activations.{json,md}: a small vision transformer, trained on digits lying on their side, is
tuned on upright ones. Two seeds; bytes by `trainwright.profile`, of plans as they predict them; processor seconds on one
thread. Plans have four fifths of the memory of full tuning.
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


PLANNED: dict[str, dict[str, Any]] = {
    "planned, exact": {},
    "planned, sampled 0.3": {"sampled": 0.3, "pins": ("*.up=sampled", "*.down=sampled")},
    "planned, sampled 0.1": {"sampled": 0.1, "pins": ("*.up=sampled", "*.down=sampled")},
}
"""Left alone, the planner samples with neither share where its cluster's costs say that recomputation is quicker."""
PLANNED_SHARE = 0.8


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 8, 8) / 16
    return x, x.transpose(1, 2).flip(1), torch.tensor(labels)[order]


def as_tokens(x: Tensor) -> Tensor:
    return x.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)


def train(model: nn.Module, x: Tensor, y: Tensor, seed: int, lr: float, by_norms: bool = False) -> float:
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
            loss_of(model, x[index], y[index]).backward()
        optimizer.step()
    return (time.process_time() - begin) / STEPS


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a model, or of one that runs under a plan."""
    if isinstance(model, Vision):
        return F.cross_entropy(model(x), y)
    loss: Tensor = model(*model.plan.shard_batch((x, y))).loss
    return loss


def plan_of(model: Vision, x: Tensor, labels: Tensor, peak_bytes: int, options: dict[str, Any]) -> tw.Plan:
    return tw.plan(
        model,
        (x[:BATCH], labels[:BATCH]),
        loss_fn=nn.CrossEntropyLoss(),
        hardware="cpu:1",
        memory=peak_bytes,
        **options,
    )


def main() -> None:
    torch.set_num_threads(1)
    accuracies: dict[str, list[float]] = {name: [] for name in (*WAYS, *PLANNED)}
    steps: dict[str, list[float]] = {name: [] for name in (*WAYS, *PLANNED)}
    kept: dict[str, Any] = {}
    plans: dict[str, tw.Plan] = {}
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
            accuracies[name].append(accuracy(model, x, labels))
        for name, options in PLANNED.items():
            if seed == 0:
                budget = int(PLANNED_SHARE * kept["full"].peak_bytes)
                plans[name] = plan_of(base, x, labels, budget, options)
            module = tw.parallelize(copy.deepcopy(base), plans[name], loss_fn=nn.CrossEntropyLoss(), seed=seed)
            steps[name].append(train(module, x, labels, seed, 1e-3))
            tuned = Vision()
            tuned.load_state_dict(tw.full_state_dict(module))
            accuracies[name].append(accuracy(tuned, x, labels))
    bytes_of = {name: (found.saved_bytes, found.peak_bytes) for name, found in kept.items()}
    bytes_of |= {name: (plan.predicted.breakdown["saved"], plan.predicted.peak_bytes) for name, plan in plans.items()}
    rows = [
        {
            "way": name, "kept KiB": bytes_of[name][0] / 1024, "peak KiB": bytes_of[name][1] / 1024,
            "processor ms a step": 1e3 * statistics.median(steps[name]),
            "step / full": statistics.median(steps[name]) / statistics.median(steps["full"]),
            "accuracy": statistics.mean(accuracies[name]), "lowest": min(accuracies[name]), "highest": max(accuracies[name]),
        }
        for name in (*WAYS, *PLANNED)
    ]  # fmt: skip
    write(rows)


def accuracy(model: Vision, x: Tensor, labels: Tensor) -> float:
    """The share of the held-out digits that is told right."""
    with torch.no_grad():
        return (model.eval()(x[300:]).argmax(1) == labels[300:]).float().mean().item()


def write(rows: list[dict[str, Any]]) -> None:
    head = {"date": date.today().isoformat(), "torch": torch.__version__}
    (RESULTS / "sampled-activations.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    for row in rows:
        lines.append(f"| {' | '.join(f'{each:.3g}' if isinstance(each, float) else each for each in row.values())} |")
    text = (
        f"`python -m benchmarks.nn.sampled`, {head['date']}, torch {head['torch']}, one thread; a vision transformer of width "
        f"{WIDTH}, batches of {BATCH} × {TOKENS} tokens, {STEPS} steps, two seeds; bytes as `trainwright.profile` finds "
        f"them, of plans as they predict them, of {PLANNED_SHARE:.0%} of full tuning's peak; what a plan keeps is what is there at "
        "its peak. Plans sample the maps into and out of the middle layers."
    )
    (RESULTS / "sampled-activations.md").write_text("\n".join(["# Sampled activations", "", text, "", *lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
