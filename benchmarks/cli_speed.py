"""How long the small commands take: wall and processor seconds, the median of a few runs each, beside `import torch` alone.

    python -m benchmarks.cli_speed [--runs 5] [--before CHECKOUT] [--no-keep]

`check` and `explain` are of a plan that was made just before, with a cache of its own; *captured* is the same with
`--no-cache`. CHECKOUT: another checkout of the project, whose commands are measured in turn with these.
Bars, on a calm machine: `zoo` and `optimizers` 1 s, `check` and `explain` 3 s of wall time.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
PLAN = "plan.json"
TRAINWRIGHT = ("-m", "trainwright")
COMMANDS = {
    "import torch": ("-c", "import torch"),
    "zoo": (*TRAINWRIGHT, "zoo"),
    "optimizers": (*TRAINWRIGHT, "optimizers"),
    "check": (*TRAINWRIGHT, "check", PLAN),
    "explain KEY": (*TRAINWRIGHT, "explain", PLAN, "transformer.wte.weight"),
    "train, one step": (*TRAINWRIGHT, "train", "zoo:gpt2-tiny", "--plan", PLAN, "--steps", "1"),
}
CAPTURED = {
    "check, captured": (*COMMANDS["check"], "--no-cache"),
    "train, one step, captured": (*COMMANDS["train, one step"], "--no-cache"),
}
Figures = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    chosen = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": chosen.before.resolve()} if chosen.before else {})
    found: dict[str, Figures] = {label: {} for label in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for label, checkout in checkouts.items():
            make = (*TRAINWRIGHT, "plan", "zoo:gpt2-tiny", "--hardware", "cpu:2", "-o", PLAN)
            run(make, checkout, Path(folder, label))
        for _ in range(chosen.runs):
            for label, checkout in checkouts.items():
                for name, command in (COMMANDS | (CAPTURED if label == "now" else {})).items():
                    found[label].setdefault(name, []).append(run(command, checkout, Path(folder, label)))
    text = table(found, chosen.runs)
    print(text)
    if chosen.keep:
        (ROOT / "benchmarks" / "results" / "cli-speed.md").write_text(text)


def run(command: tuple[str, ...], checkout: Path, folder: Path) -> tuple[float, float]:
    """Return the wall seconds and the processor seconds (children's too) of `python COMMAND` on a checkout."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TRAINWRIGHT_CACHE": str(folder / "cache")}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True, capture_output=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(found: dict[str, Figures], runs: int) -> str:
    """Return the medians as a page."""
    lines = [
        "# The small commands\n",
        f"`python -m benchmarks.cli_speed --runs {runs}`, {datetime.date.today()}; torch {torch.__version__}, Python",
        f"{platform.python_version()}, {os.cpu_count()} cores; load {os.getloadavg()[1]:.1f} over the last five minutes.",
        "gpt2-tiny, medians, wall (processor) seconds; `train` counts both ranks' processor seconds.\n",
        f"| command | {' | '.join(found)} |",
        f"|---|{'---|' * len(found)}",
    ]
    for name in found["now"]:
        lines.append(f"| {name} | {' | '.join(_median(figures.get(name)) for figures in found.values())} |")
    return "\n".join(lines) + "\n"


def _median(figures: list[tuple[float, float]] | None) -> str:
    if figures is None:
        return "–"
    wall_s, processor_s = (statistics.median(values) for values in zip(*figures))
    return f"{wall_s:.2f} ({processor_s:.2f})"


if __name__ == "__main__":
    main()
