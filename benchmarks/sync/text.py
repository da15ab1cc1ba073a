"""A small GPT on the standard library's sources by each sync method: bytes and rounds to a held-out loss, three seeds.

python -m benchmarks.sync.text [--workers 4]     writes benchmarks/results/sync-text.{md,json} and a figure (needs matplotlib)
python -m benchmarks.sync.text --kinds           writes benchmarks/results/sync-text-kinds.{md,json}

Workers are simulated, so that bytes, rounds and losses do not depend on the machine; each has other modules' sources, or, with
--kinds, text of another kind: modules, tables of encodings, Python's help in English, headers in C. One rule
tunes all: the rate, of three around the optimizer's usual one, that has the least loss with seed 0 after a third of the steps.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.solvers.record import write
from trainwright import sync
from trainwright.sync import Simulation, Steps, simulate

STEPS, EVERY, SEEDS, BATCH, CONTEXT, WIDTH = 180, 20, (0, 1, 2), 8, 32, 32
RATES = {"adamw": 3e-3, "sgd": 0.1}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-parallel": ("adamw", {}),
    "powersgd": ("adamw", {"rank": 2, "start_step": 24}),
    "local-sgd": ("adamw", {"period": 8}),
    "post-local-sgd": ("adamw", {"period": 8, "shared_steps": 24}),
    "diloco": ("adamw", {"period": 20}),
    "streaming-diloco": ("adamw", {"period": 20, "fragments": 4, "delay": 1, "mix": 0.5}),
    "easgd": ("adamw", {"period": 8}),
    "lsgd": ("adamw", {"group_period": 4, "global_period": 8, "num_groups": 2}),
    "gossip": ("adamw", {}),
    "1-bit-adam": ("adamw", {"freeze_step": 48}),
    "1-bit-lamb": ("adamw", {"freeze_step": 48}),
    "decentlam": ("sgd", {}),
    "data-parallel, SGD": ("sgd", {}),
}
REMARKS = (
    f"a GPT of two blocks, width {WIDTH}, context {CONTEXT}, on bytes; batches of {BATCH} a worker, each with text of its own",
    f"loss: at the mean of all workers' parameters, on text that none has, looked at every {EVERY} steps of {STEPS}; the goal "
    "is what data-parallel (AdamW) has, as a median, after two thirds of the steps",
    "rates: a third, one and three times 0.003 (AdamW) or 0.1 (SGD, momentum 0.9), by the loss of seed 0 after a third of them",
    "three seeds of data order and start; a median, and the spread of the final loss",
)
OF_KINDS = "each worker has text of another kind: modules, encodings, help in English, headers in C; held out is a tenth of each"


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        ]
        self.blocks, self.norm, self.head = nn.ModuleList(block), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


@cache
def kinds(num_workers: int) -> list[Tensor]:
    """Text of another kind for each worker, and last what is held out, a tenth of each kind."""
    paths = {name: Path(where) for name, where in sysconfig.get_paths().items()}
    library, headers = paths["stdlib"], paths["include"]
    found = [
        library.glob("*.py"),
        library.glob("encodings/*.py"),
        [library / "pydoc_data/topics.py"],
        headers.glob("*.h"),
    ]
    each = [_read(sorted(files)) for files in found]
    length = min(len(text) for text in each)
    cuts = [length * 9 // 10, length - length * 9 // 10]
    own, held = zip(*(text[:length].split(cuts) for text in each))
    return [*(own[rank % len(own)] for rank in range(num_workers)), torch.cat(held)]


@cache
def texts(num_workers: int) -> list[Tensor]:
    """The sources of each worker, of modules in alphabetical runs, and last those held out: every tenth module."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held = [path for index, path in enumerate(paths) if index % 10 == 0]
    own = [path for index, path in enumerate(paths) if index % 10]
    cut = -(-len(own) // num_workers)
    return [_read(own[first : first + cut]) for first in range(0, len(own), cut)] + [_read(held)]


def _read(paths: list[Path]) -> Tensor:
    data = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(byte for byte in data if byte < 128), dtype=torch.uint8).long()


def batch(text: Tensor, generator: torch.Generator, size: int = BATCH) -> tuple[Tensor, Tensor]:
    begins = torch.randint(len(text) - CONTEXT - 1, (size, 1), generator=generator)
    rows = text[begins + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())


def worker(title: str, rate: float, seed: int, steps: int, data: list[Tensor]) -> Steps[Any]:
    kind, options = METHODS[title]
    torch.manual_seed(seed)
    model = GPT()
    make: Any = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=rate, **({"momentum": 0.9} if kind == "sgd" else {}))
    joined = yield from sync.join(title.partition(",")[0], model, optimizer, **options)
    rank, num_workers = joined.method.worker.rank, joined.method.worker.size
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    held = batch(data[-1], torch.Generator().manual_seed(7), 128)
    seen = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, batch(data[rank], generator))
        loss.backward()
        yield from joined.steps(loss.detach())
        if step % EVERY == 0:
            own = joined.method.replica.read()
            total = yield sync.AllReduce(own)  # taken out of the bytes again
            if rank == 0:
                joined.method.replica.write(total / num_workers)
                with torch.no_grad():
                    seen.append(float(loss_of(model, held)))
                joined.method.replica.write(own)
    return joined, seen


def trained(title: str, rate: float, seed: int, steps: int, data: list[Tensor]) -> tuple[list[float], Any]:
    run: Simulation[Any] = simulate([worker(title, rate, seed, steps, data) for _ in data[:-1]])
    joined, seen = run.results[0]
    return seen, joined


def sent_mib(joined: Any, step: int) -> float:
    """The bytes that all have sent up to a step, as declared: they are those counted."""
    return joined.record.sent_bytes(joined.size, step) / 2**20


def best_rate(title: str, data: list[Tensor]) -> float:
    usual = RATES[METHODS[title][0]]
    tried = {factor: trained(title, factor * usual, 0, STEPS // 3, data)[0][-1] for factor in (1 / 3, 1.0, 3.0)}
    finite = {factor: loss for factor, loss in tried.items() if math.isfinite(loss)}
    return usual * min(finite, key=lambda factor: finite[factor])


def compared(data: list[Tensor]) -> Iterator[tuple[dict[str, Any], list[tuple[float, float]]]]:
    goal = math.nan
    for title in METHODS:
        rate = best_rate(title, data)
        runs = [trained(title, rate, seed, STEPS, data) for seed in SEEDS]
        joined = runs[0][1]
        curve = [statistics.median(seen[index] for seen, _ in runs) for index in range(STEPS // EVERY)]
        goal = curve[len(curve) * 2 // 3 - 1] if math.isnan(goal) else goal
        reached = [
            next((EVERY * (index + 1) for index, loss in enumerate(seen) if loss <= goal), math.inf) for seen, _ in runs
        ]
        steps, ends = statistics.median(reached), sorted(seen[-1] for seen, _ in runs)
        row = {
            "method": title,
            "rate": rate,
            "goal": goal,
            "seeds that reach it": sum(map(math.isfinite, reached)),
            "steps": steps,
            "MiB sent by all": sent_mib(joined, int(steps)) if math.isfinite(steps) else math.inf,
            "MiB in all steps": sent_mib(joined, STEPS),
            "final loss": ends[1],
            "spread": ends[-1] - ends[0],
        }
        print(row, flush=True)
        yield row, [(sent_mib(joined, EVERY * (index + 1)), loss) for index, loss in enumerate(curve)]


def plotted(curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for index, (title, points) in enumerate(curves.items()):
        axes.plot(
            *zip(*points), label=title, color=f"C{index % 10}", linestyle="--" if index >= 10 else "-", marker="."
        )
    axes.set(xscale="log", xlabel="MiB sent by all workers", ylabel="held-out loss at the mean of parameters")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    workers: Annotated[int, typer.Option(metavar="N", min=2)] = 4,
    of_kinds: Annotated[bool, typer.Option("--kinds", help="Each worker has text of another kind.")] = False,
) -> None:
    """Compare all methods, and write the table, and the figure of workers whose data are much alike."""
    torch.set_num_threads(1)
    rows, curves = [], {}
    for row, curve in compared(kinds(workers) if of_kinds else texts(workers)):
        rows.append(row)
        curves[row["method"]] = curve
    if of_kinds:
        write("sync-text-kinds", {f"{workers} workers with text of another kind each": rows}, (OF_KINDS, *REMARKS))
        return
    write("sync-text", {f"{workers} workers with other modules each": rows}, REMARKS)
    plotted(curves, Path(__file__).parents[2] / "docs" / "sync-bytes.png")


if __name__ == "__main__":
    typer.run(main)
