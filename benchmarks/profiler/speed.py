"""How long a profile takes: beside the real step for models that can run here, and for Llama-3-70B from its config.

    python -m benchmarks.profiler.speed [--out benchmarks/results/profiler-speed.md]

Every row is a process of its own (`--row`), so that its peak memory is its own; imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainwright.hardware.machine import memory_bytes
from trainwright.models import zoo
from trainwright.profiler import profile, reference_step

RUNNABLE: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {},
    "llama-tiny": {},
    "mixtral-tiny": {},
    "bert-tiny": {},
    "t5-tiny": {},
    "vit-tiny": {},
    "resnet-tiny": {},
    "gpt2": {"batch_size": 2, "seq_len": 512},
    "bert-base": {"batch_size": 4, "seq_len": 256},
    "t5-base": {"batch_size": 2, "seq_len": 128},
    "vit-b-16": {"batch_size": 4},
    "resnet-50": {"batch_size": 8},
}
PROFILED_ONLY: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"dtype": "bf16"},
    "llama-3-70b": {"dtype": "bf16"},
}
NUM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the table there as well")
    parser.add_argument("--row", metavar="NAME", help="measure one model, and print its row as JSON")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measured(arguments.row)))
        return
    rows = [_in_own_process(name) for name in (*RUNNABLE, *PROFILED_ONLY)]
    text = page(rows)
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf8")


def measured(name: str) -> dict[str, Any]:
    """Build one model from its config, profile it, and train it for a few steps where it can be run here."""
    options = {**RUNNABLE, **PROFILED_ONLY}[name]
    profile(*zoo.build("llama-tiny"))  # what torch and transformers import and set up on first use
    start = time.perf_counter()
    model, batch = zoo.build(name, **options)
    build_s = time.perf_counter() - start
    found = profile(model, batch, name=name)
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "model": name,
        "options": ", ".join(f"{key}={value}" for key, value in options.items()),
        "num_ops": found.num_ops,
        "build_s": build_s,
        "profile_s": found.profile_s,
        "peak_rss_bytes": peak_rss_bytes,
        "step_s": real_step_s(name, options) if name in RUNNABLE else None,
    }


def real_step_s(name: str, options: dict[str, Any]) -> float:
    """The median time of a steady-state step with AdamW in a loop, as the profile assumes it."""
    model, batch = zoo.build(name, device="cpu", **options)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, foreach=False, fused=False)
    times = []
    for _ in range(NUM_STEPS + 1):
        start = time.perf_counter()
        reference_step(model, optimizer, batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def page(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown page."""
    head = (
        "# How long a profile takes\n\n"
        f"* Command: `python -m benchmarks.profiler.speed`, {time.strftime('%Y-%m-%d')}\n"
        f"* Machine: {platform.machine()}, {torch.get_num_threads()} threads, {memory_bytes() / 2**30:.0f} GiB, "
        f"{torch.backends.cpu.get_cpu_capability()}, load {os.getloadavg()[1]:.1f} (1 or less: nothing else ran); "
        f"torch {torch.__version__}, Python {platform.python_version()}\n"
        "* Each row is a process of its own; imports are not counted. Peak memory is that of the whole process, torch\n"
        "  and transformers included. The real step: the second and later ones, AdamW in a loop, median of "
        f"{NUM_STEPS}.\n\n"
        "| model | settings | ops in a step | build s | profile s | peak RSS MiB | real step s | profile / step |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(map(_line, rows))


def _line(row: dict[str, Any]) -> str:
    step_s = row["step_s"]
    real = ("—", "—") if step_s is None else (f"{step_s:.3f}", f"{row['profile_s'] / step_s:.2f}")
    return (
        f"| {row['model']} | {row['options'] or 'default'} | {row['num_ops']:,} | {row['build_s']:.2f} | "
        f"{row['profile_s']:.2f} | {row['peak_rss_bytes'] / 2**20:,.0f} | {real[0]} | {real[1]} |\n"
    )


def _in_own_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.profiler.speed", "--row", name]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
