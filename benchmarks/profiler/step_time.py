"""Predicted against measured time of a training step, calibration and measurement interleaved in one run.

    python -m benchmarks.profiler.step_time [NAME[:BATCH[:SEQ]] ...] [--rounds N] [--out FILE]

Each round measures the kernels of this machine anew (one process, as `calibrate` does) and runs every model's
step a few times. A model's predicted time is told by the median table of all rounds, its measured time is the median
over the rounds; beside the error stands the machine's own spread: half the range of the rounds' medians, relative.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainwright.artifacts import Cluster, Overheads
from trainwright.hardware import resolve
from trainwright.hardware.kernels import kernel_table, rates
from trainwright.hardware.overheads import overheads
from trainwright.models import zoo
from trainwright.ops.kernel_table import KernelTable
from trainwright.profiler import profile, reference_step

DEFAULT = ("gpt2:1:128", "gpt2-tiny:32:64", "llama-tiny:32:64", "bert-tiny:32:64", "vit-tiny:32", "resnet-tiny:16", "t5-tiny:16",
           "mixtral-tiny:8", "vit-b-16:2", "resnet-50:2", "t5-base:1", "bert-large:1:64")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(DEFAULT), help="NAME[:BATCH[:SEQ]] of the zoo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the record there, and a table beside it (.md)")
    arguments = parser.parse_args()
    record = {
        "command": " ".join(["python -m benchmarks.profiler.step_time", *sys.argv[1:]]),
        **machine(),
        **run(arguments.models, arguments.rounds),
    }
    print(table(record))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
        arguments.out.with_suffix(".md").write_text(table(record), encoding="utf8")


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def run(specs: list[str], num_rounds: int) -> dict[str, Any]:
    """Measure tables and steps in turn, then predict with the median table."""
    tables, beyond = [], []
    times: dict[str, list[float]] = {spec: [] for spec in specs}
    for _ in range(num_rounds):
        tables.append(rates(False, clock))
        beyond.append(overheads(KernelTable(kernel_table(tables[-1:])), clock))
        for spec in specs:
            times[spec].append(step_seconds(spec))
    cluster = calibrated(tables, beyond)
    rows = [row(spec, times[spec], cluster) for spec in specs]
    return {"median_error": statistics.median(abs(found["error"]) for found in rows), "rows": rows}


def row(spec: str, measured: list[float], cluster: Cluster) -> dict[str, Any]:
    model, batch = build(spec, "meta")
    predicted_s = profile(model, batch, hardware=cluster).step_s
    assert predicted_s is not None
    measured_s = statistics.median(measured)
    return {
        "model": spec,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        "spread": (max(measured) - min(measured)) / 2 / measured_s,
    }


def calibrated(tables: list[list[list[Any]]], beyond: list[dict[str, float]]) -> Cluster:
    """The cluster `cpu:1` with the median of each measured kernel."""
    medians = {name: statistics.median(entry[name] for entry in beyond) for name in beyond[0]}
    here = resolve("cpu:1")
    device = here.device.model_copy(update={"kernels": kernel_table(tables), "overheads": Overheads(**medians)})
    return here.model_copy(update={"device": device})


def step_seconds(spec: str) -> float:
    """The median of some steps of the reference loop."""
    model, batch = build(spec, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=False)
    return clock(lambda: reference_step(model, optimizer, batch), 1.0)


def build(spec: str, device: str) -> tuple[Any, Any]:
    name, *sizes = spec.split(":")
    options = dict(zip(("batch_size", "seq_len"), map(int, sizes)))
    return zoo.build(name, device=device, **options)


def clock(run: Callable[[], Any], budget_s: float) -> float:
    """The median of at least three runs, after one that is not counted."""
    run()
    taken, begin = [], time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - begin < budget_s and len(taken) < 1000):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def table(record: dict[str, Any]) -> str:
    """The record as a table in Markdown."""
    lines = [
        "# Step time: predicted against measured",
        "",
        f"`{record['command']}` on {record['date']}, {record['machine']}, {record['num_threads']} threads, "
        f"torch {record['torch']}.",
        f"Median absolute error {record['median_error']:.1%}. Spread: half the range of the rounds' medians.",
        "",
        "| model | predicted | measured | error | spread of the machine |",
        "|---|---|---|---|---|",
    ]
    for found in record["rows"]:
        lines.append(
            f"| {found['model']} | {found['predicted_s'] * 1e3:.1f} ms | {found['measured_s'] * 1e3:.1f} ms "
            f"| {found['error']:+.1%} | ±{found['spread']:.1%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
