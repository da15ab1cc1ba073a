"""Show the exchange grow with the number of workers: 8 to 1,000 simulated ones on 100 Mbit/s, priced and, where said, simulated.

python -m benchmarks.sync.scaling     writes benchmarks/results/sync-scaling.{md,json} and docs/sync-scaling.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.solvers.record import write
from trainwright import sync
from trainwright.sync import Compute, Network, Size, Steps, simulate

NUM_PARAMS, COMPUTE_S, NUMBERS = 10_000_000, 0.5, (8, 16, 32, 64, 128, 256, 512, 1000)
LINK = Network(1e-3, 12.5e6)
OPTIONS: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "powersgd": {"rank": 4, "start_step": 0, "error_feedback": False, "warm_start": False},
    "local-sgd": {"period": 8},
    "diloco": {"period": 100},
    "lsgd": {"group_period": 4, "global_period": 16, "num_groups": 1},
    "easgd": {"period": 8},
    "decentlam": {"graph": "ring"},
    "gossip": {"graph": "exponential"},
    "1-bit-adam": {"freeze_step": 1},
    "sa-srrw": {"graph": "ring"},
    "gradient-coding": {"stragglers": 1},
    "just-one-byte": {"num_samples": 1},
}
SIMULATED = {
    "data-parallel": (8, 64, 256),
    "local-sgd": (8, 64, 256, 1000),
    "decentlam": (8, 64, 256, 1000),
    "lsgd": (8, 64, 1000),
}


def priced(name: str, number: int) -> float:
    """Seconds of a step: the gradient, and on average the exchange."""
    size = Size((NUM_PARAMS,), 4, number, OPTIONS[name], ((2500, 4000),))
    return sync.price(sync.record(name), size, LINK, COMPUTE_S).step_s


def simulated(name: str, number: int, steps: int = 16, num_params: int = 64) -> float:
    """The same on the simulator's clock, of a small model over a link that is slower by as much."""
    link = Network(LINK.latency_s, LINK.bytes_per_s * num_params / NUM_PARAMS)

    def worker() -> Steps[None]:
        model = nn.Linear(num_params, 1, bias=False)
        nn.init.zeros_(model.weight)
        joined = yield from sync.join(name, model, torch.optim.SGD(model.parameters(), lr=0.1), **OPTIONS[name])
        for _ in range(steps):
            model.weight.grad = torch.ones_like(model.weight)
            yield Compute()
            yield from joined.steps(torch.zeros(()))

    agreement_s = link.collective_s([("all_gather", 512)], tuple(range(number)))
    return (simulate([worker() for _ in range(number)], link, COMPUTE_S).seconds - agreement_s) / steps


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name in OPTIONS:
        row: dict[str, Any] = {"method": name}
        for number in NUMBERS:
            row[f"{number}"] = priced(name, number)
        row["simulated"] = ", ".join(f"{number}: {simulated(name, number):.3g}" for number in SIMULATED.get(name, ()))
        rows.append(row)
        print(row, flush=True)
    _plot(rows, Path(__file__).parents[2] / "docs" / "sync-scaling.png")
    remarks = (
        f"seconds a step of {NUM_PARAMS:,} parameters in fp32 (one matrix, for powersgd), whose gradient takes {COMPUTE_S} s, "
        "on links of 100 Mbit/s and 1 ms; sa-srrw: of the whole system, one worker at a time",
        "simulated: a model of 64 parameters on a link slower by as much, 16 steps on the clock, at so many workers",
    )
    write("sync-scaling", {"seconds a step by number of workers": rows}, remarks)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for index, row in enumerate(rows):
        seconds = [row[f"{number}"] for number in NUMBERS]
        axes.plot(NUMBERS, seconds, label=row["method"], color=f"C{index % 10}", linestyle="--" if index >= 10 else "-")
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds a step (10 M parameters, 100 Mbit/s)")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
