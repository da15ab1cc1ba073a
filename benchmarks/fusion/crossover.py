"""Steps of B models: fused, one after the other, and by torch.func.vmap; where fusing stops to pay.

python -m benchmarks.fusion.crossover [--quick]

Writes benchmarks/results/fusion.{json,md} and fusion-crossover.png. Processor seconds on one thread;
in each cell the three take turns, and the medians are compared.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainwright import fusion

RESULTS = Path(__file__).parent.parent / "results"
CRITERION = nn.CrossEntropyLoss()
Case = tuple[Callable[[], nn.Module], Callable[[], Any]]


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Cnn(nn.Sequential):
    def __init__(self, width: int) -> None:
        layers = []
        for num_in in (3, width, width):
            layers += [nn.Conv2d(num_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Transformer(nn.Module):
    """Causal blocks without dropout, for sequences of 16."""

    def __init__(self, width: int, blocks: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num, length, width = x.shape
        q, k, v = (each.view(num, length, 4, -1).transpose(1, 2) for each in self.qkv(self.one(x)).chunk(3, -1))
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(num, length, width)
        )
        return x + self.mlp(self.two(x))


def cases(width: int) -> dict[str, Case]:
    return {
        "mlp": (lambda: Mlp(width), lambda: (torch.randn(32, 32), torch.randint(0, 10, (32,)))),
        "cnn": (lambda: Cnn(width), lambda: (torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,)))),
        "gpt": (lambda: Transformer(width), lambda: (torch.randint(0, 64, (4, 16)), torch.randint(0, 64, (4, 16)))),
    }


def main(quick: bool = False) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for width in (16, 64) if quick else (16, 32, 64, 128, 256):
        for name, case in cases(width).items():
            for num in (2, 8) if quick else (1, 2, 4, 8, 16):
                if width * num <= 512:
                    rows.append(measured(name, width, num, case))
                    print(rows[-1], flush=True)
    if not quick:
        write(rows)


def measured(name: str, width: int, num: int, case: Case) -> dict[str, Any]:
    """Processor seconds of a step of all models, three ways that take turns."""
    build, batch_of = case
    models, batch = [build() for _ in range(num)], batch_of()
    ways = {"alone": one_by_one(models, batch), "vmap": by_vmap(models, batch), "fused": fused(models, batch)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(7):
        for way, step in ways.items():
            begin = time.process_time()
            for _ in range(2):
                step()
            if turn > 1:
                seconds[way].append((time.process_time() - begin) / 2)
    found = {way: statistics.median(taken) for way, taken in seconds.items()}
    ratios = {"alone / fused": found["alone"] / found["fused"], "vmap / fused": found["vmap"] / found["fused"]}
    return {
        "model": name,
        "width": width,
        "B": num,
        **{f"{way} ms": 1e3 * value for way, value in found.items()},
        **ratios,
    }


def one_by_one(models: list[nn.Module], batch: Any) -> Callable[[], None]:
    own = [copy.deepcopy(model) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in own]

    def step() -> None:
        for model, optimizer in zip(own, optimizers):
            optimizer.zero_grad()
            CRITERION(model(batch[0]), batch[1]).backward()
            optimizer.step()

    return step


def by_vmap(models: list[nn.Module], batch: Any) -> Callable[[], None]:
    """torch.func's ensemble, with one AdamW of one rate for all: it has no other."""
    params, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0])
    optimizer = torch.optim.AdamW(list(params.values()), lr=1e-3, fused=True)

    def loss(own: Any, buffer: Any) -> torch.Tensor:
        return CRITERION(torch.func.functional_call(base, (own, buffer), (batch[0],)), batch[1])

    def step() -> None:
        optimizer.zero_grad()
        torch.func.vmap(loss)(params, buffers).sum().backward()
        optimizer.step()

    return step


def fused(models: list[nn.Module], batch: Any) -> Callable[[], None]:
    own = fusion.fuse(models)
    optimizer = fusion.optimizer(
        "adamw", own, lr=[1e-3 / (1 + at) for at in range(len(models))], on_nan="keep", fused=True
    )

    def step() -> None:
        optimizer.zero_grad()
        own.loss(batch, CRITERION).sum().backward()
        optimizer.step()

    return step


def write(rows: list[dict[str, Any]]) -> None:
    head = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
    }
    (RESULTS / "fusion.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(
            f"| {' | '.join(f'{value:.2f}' if isinstance(value, float) else str(value) for value in row.values())} |"
        )
    how = (
        f"`python -m benchmarks.fusion.crossover`, {head['date']}, torch {head['torch']}, one thread of a shared CPU; processor "
        "time of a step of all B models with AdamW, the median of five turns. Fused models have a rate each, vmap's one for all."
    )
    text = ["# B models as one", "", how, "", "![the ratio to runs alone](fusion-crossover.png)", "", *lines, ""]
    (RESULTS / "fusion.md").write_text("\n".join(text))
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    """The ratio against the width, a line a number of models; 1 is the crossover."""
    from matplotlib import pyplot as plt

    names = sorted({row["model"] for row in rows})
    figure, axes = plt.subplots(1, len(names), figsize=(12, 3.6), sharey=True)
    for name, axis in zip(names, axes):
        for num in (2, 4, 8, 16):
            own = [row for row in rows if row["model"] == name and row["B"] == num]
            axis.plot(
                [row["width"] for row in own], [row["alone / fused"] for row in own], marker="o", label=f"B = {num}"
            )
        axis.axhline(1.0, color="gray", linestyle=":")
        axis.set(title=name, xlabel="width", xscale="log", yscale="log")
        axis.minorticks_off()
        axis.set_xticks([16, 32, 64, 128, 256], ["16", "32", "64", "128", "256"])
        axis.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes[0].set_ylabel("time alone / time fused")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "fusion-crossover.png", dpi=110)


if __name__ == "__main__":
    main("--quick" in sys.argv)
