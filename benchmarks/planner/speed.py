"""How long planning takes, how near the plan is to the proven optimum, and how much of the budget it uses.

    python -m benchmarks.planner.speed [CASE…] [--keep NAME]

A case is a model on a cluster under several budgets, solved jointly (recipes: `benchmarks.planner.grid`). With `--keep`, cases
that were recorded before and are not run now stay in the table.
Every row is a process of its own (`--row`), so that its peak memory is its own. `model to plan` counts capture, the
recording of what each op saves, all solves and all simulations; imports and the building of the model (on the meta
device) are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import trainwright as tw
from benchmarks.solvers import record
from trainwright.models import zoo


@dataclass(frozen=True)
class Case:
    """A model on a cluster; `budgets` are per device, loose first."""

    model: str
    hardware: str
    budgets: tuple[str, ...]
    mesh: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    bar_s: float | None = None
    """The longest that a plan may take on 2 cores."""


LLAMA: dict[str, Any] = {"dtype": "bf16", "batch_size": 64, "seq_len": 8192}
CASES: dict[str, Case] = {
    "gpt2-8": Case("gpt2", "8xh100", ("70GiB", "1400MiB"), (8,), bar_s=3),
    "gpt2-2x4": Case("gpt2", "2x4xh100", ("70GiB", "1400MiB"), (2, 4), bar_s=4),
    "gpt2-any": Case("gpt2", "8xh100", ("70GiB",), bar_s=3),
    "t5-2x2": Case("t5-base", "4xh100", ("2GiB",), (2, 2)),
    "8b-8x8": Case("llama-3-8b", "8x8xh100", ("70GiB", "20GiB"), (8, 8), LLAMA, bar_s=10),
    "8b-2x4x8": Case("llama-3-8b", "8x8xh100", ("70GiB",), (2, 4, 8), LLAMA, bar_s=20),
    "70b-8x8": Case("llama-3-70b", "8x8xh100", ("70GiB",), (8, 8), LLAMA, bar_s=25),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)}; default: all")
    parser.add_argument("--keep", metavar="NAME", help="write the table to benchmarks/results/planner-NAME as well")
    parser.add_argument("--at-most", metavar="S", type=float, default=3600.0, help="begin no row after so many seconds")
    parser.add_argument("--row", nargs=2, metavar=("CASE", "BUDGET"), help="one row, printed as JSON")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measured(*arguments.row)))
        return
    end = time.perf_counter() + arguments.at_most
    sections = {name: rows for name in arguments.cases or CASES if (rows := _rows(name, end))}
    name = f"planner-{arguments.keep or 'speed'}"
    sections = {**_recorded(name), **sections} if arguments.keep else sections
    record.write(name, sections, [_REMARK], ("highspy", "transformers"), arguments.keep is not None)


_REMARK = (
    "GPU rates and links are presets (fractions of data sheets), so step times are a model's; planning times, gaps and "
    "peak/budget do not depend on that. One row at a time; where other work shares the cores, the CPU seconds of the process "
    "say more than its wall-clock."
)


def _recorded(name: str) -> dict[str, Any]:
    path = record.RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf8"))["sections"] if path.exists() else {}


def measured(case_name: str, budget: str) -> dict[str, Any]:
    """Plan once, after a tiny model has made torch and transformers import what they need."""
    case = CASES[case_name]
    tw.plan(*zoo.build("llama-tiny"), hardware="2xh100")
    model, batch = zoo.build(case.model, **case.options)
    row: dict[str, Any] = {"budget": budget}
    start, start_cpu = time.perf_counter(), time.process_time()
    try:
        plan = tw.plan(model, batch, hardware=case.hardware, memory=budget, mesh=case.mesh)
    except tw.Refusal as refusal:
        row |= {"mesh": "none fits", "why": str(refusal)}
    else:
        row |= {
            "mesh": "x".join(map(str, plan.mesh.values())),
            "step ms": 1e3 * plan.predicted.step_s,
            "peak MiB": plan.predicted.peak_bytes / 2**20,
            "peak/budget": plan.predicted.peak_bytes / (plan.budget_bytes or 1),
            "gap %": "none" if plan.solver.gap is None else 100 * plan.solver.gap,
        }
    row["model to plan s"] = time.perf_counter() - start
    row["CPU s"] = time.process_time() - start_cpu
    row["RSS MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def _rows(name: str, end: float) -> list[dict[str, Any]]:
    case = CASES[name]
    settings = " ".join([case.model, *(f"{key}={value}" for key, value in case.options.items())])
    head = {"model": settings, "cluster": case.hardware, **_COLUMNS}
    return [_row(head, case, (name, budget)) for budget in case.budgets if time.perf_counter() < end]


def _row(head: dict[str, Any], case: Case, asked: tuple[str, str]) -> dict[str, Any]:
    row = {**head, **_in_own_process(*asked), "bar s": "" if case.bar_s is None else case.bar_s}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


_COLUMNS = dict.fromkeys(
    ("budget", "mesh", "step ms", "peak MiB", "peak/budget", "gap %", "model to plan s", "CPU s", "RSS MiB"),
    "",
)


def _in_own_process(*row: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planner.speed", "--row", *row]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(finished.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
