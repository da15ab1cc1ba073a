"""Ways to cut models into pipeline stages, priced by one simulator: four models, three budgets, two clusters.

    python -m benchmarks.planner.pipeline [MODEL …] [--clusters NAME …] [--shares SHARE …] [--record]

even, balanced, pipeline-dp   the recipes of `planner/pipeline/recipes.py`, 1F1B
joint, 1F1B                   cuts, depths and reruns chosen together, in the usual order
joint                         interleaved stages and a split backward too

Budgets lie between the least that stages were found to fit in (an estimate) and the peak of the joint 1F1B plan without any: so
many shares of the way from the one to the other. Logits stand whole. Seconds are predicted; no GPU ran. `–`: no such stages fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import trainwright as tw
from trainwright.artifacts import Plan, Refusal
from trainwright.planner.pipeline.search import NoStagesFit

ROWS = Path(__file__).parent.parent / "results" / "planner-pipeline.jsonl"
RESULT = ROWS.with_suffix(".md")
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch_size": 64, "seq_len": 512},
    "bert-large": {"batch_size": 64, "seq_len": 256},
    "llama-3-8b": {"batch_size": 16, "seq_len": 2048, "num_hidden_layers": 8},
    "t5-base": {"batch_size": 64, "seq_len": 256},
}
CLUSTERS = {"2x4xh100": {"pipeline": 2, "mesh": 4}, "4x2xa100": {"pipeline": 4, "mesh": 2}}
SHARES = (1.0, 0.5, 0.1)
NUM_MICRO = 8
RECIPES = ("even", "balanced", "pipeline-dp")


def cell(name: str, hardware: str, shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:
    """Return a row for each budget."""
    model, batch = tw.zoo.build(name, dtype="bf16", **MODELS[name])
    asked = question(hardware)
    free = tw.plan(model, batch, **asked, memory="100TiB", pipeline_schedule="1f1b")
    most = free.predicted.peak_bytes
    least = _least_bytes(model, batch, most, asked)
    found = []
    for share in shares:
        memory = int(least + share * (most - least)) + 1
        began = time.process_time()
        plans = tw.compare(model, batch, **asked, memory=memory, pipeline_schedule="1f1b")
        usual = plans.pop("joint")
        try:
            other: Plan | Refusal = tw.plan(model, batch, **asked, memory=memory)
        except Refusal as refusal:
            other = refusal
        joint = min((plan for plan in (usual, other) if isinstance(plan, Plan)), key=_step_s, default=None)
        row = {"model": name, "cluster": hardware, "budget": memory, "share": share}
        row |= {solver: _step_s(plan) for solver, plan in plans.items()}
        row |= {"joint, 1F1B": _step_s(usual), "joint": _step_s(joint), "order": _order(joint)}
        row |= {"gap": None if joint is None else joint.solver.gap, "cpu_s": round(time.process_time() - began, 1)}
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def question(hardware: str) -> dict[str, Any]:
    """Return what a cell's plans are asked for beside model and budget; logits stand whole, as they do for the recipes."""
    return {
        "hardware": hardware,
        "micro_batches": NUM_MICRO,
        "time_limit_s": 600.0,
        "loss_chunks": "none",
        **CLUSTERS[hardware],
    }


def _least_bytes(model: Any, batch: Any, most: int, asked: dict[str, Any]) -> float:
    """Return an estimate of the least peak that 1F1B stages can have: what the refusal of next to nothing says."""
    memory = most
    while True:
        memory //= 2
        try:
            tw.plan(model, batch, **asked, memory=memory, pipeline_schedule="1f1b")
        except NoStagesFit as refusal:
            return min(refusal.least_bytes, most)


def _step_s(plan: Any) -> float | None:
    return plan.predicted.step_s if isinstance(plan, Plan) else None  # type: ignore[return-value]


def _order(plan: Plan | None) -> str:
    if plan is None or plan.pipeline is None:
        return "–"
    if plan.pipeline.split_backward:
        return "zero bubble"
    return f"interleaved {plan.pipeline.virtual}" if plan.pipeline.virtual > 1 else "1F1B"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the record's table: a row a cell, in milliseconds, with what joint gains over the best recipe."""
    lines = [
        "| model | cluster | budget | even | balanced | pipeline-dp | joint, 1F1B | joint | order | over pipeline-dp | gap | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = [row[name] for name in (*RECIPES, "joint, 1F1B", "joint")]
        shown = ["–" if step is None else f"{1e3 * step:.2f}" for step in steps]
        gain = (
            "–"
            if None in (row["joint"], row["pipeline-dp"])
            else f"{100 * (1 - row['joint'] / row['pipeline-dp']):.1f} %"
        )
        gap = "–" if row["gap"] is None else f"{100 * row['gap']:.0f} %"
        lines.append(
            f"| {row['model']} | {row['cluster']} | {row['share']:.2f} · {row['budget'] / 2**30:.2f} GiB | "
            f"{' | '.join(shown)} | {row['order']} | {gain} | {gap} | {row['cpu_s']} s |"
        )
    return "\n".join(lines)


def recorded(rows: list[dict[str, Any]], path: Path = ROWS) -> list[dict[str, Any]]:
    """Write `rows` in the place of those of the same cells; return all that are recorded, in order."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    cells = {(row["model"], row["cluster"], row["share"]): row for row in [*known, *rows]}
    order = [(name, hardware, share) for name in MODELS for hardware in CLUSTERS for share in SHARES]
    found = [cells[cell] for cell in order if cell in cells]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return found


def main() -> None:
    """Price cells; with `--record` write them into the record, which has those of other runs too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, hardware in itertools.product(given.models, given.clusters):
        rows += cell(name, hardware, given.shares)
        if given.record:
            write(recorded(rows))
    print(summary(recorded(rows) if given.record else rows))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the table, and in how many cells another way is faster than joint."""
    slower = [row for row in rows if any(row[name] and row[name] < row["joint"] for name in (*RECIPES, "joint, 1F1B"))]
    return f"{table(rows)}\n\njoint slower than another: {len(slower)} of {len(rows)} cells"


def write(rows: list[dict[str, Any]]) -> None:
    """Write the record."""
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    RESULT.write_text(
        f"# Pipeline stages: joint plans beside recipes\n\n{time.strftime('%Y-%m-%d')}, {machine}. Steps in ms, predicted by "
        f"the simulation; no GPU ran.\nbf16, {NUM_MICRO} micro-batches, {MODELS}; stages and mesh of one: {CLUSTERS}. Budgets: "
        "shares of the way from the least that fits, as estimated, to the joint 1F1B plan's peak without any. CPU: processor "
        f"seconds of a cell's five plans.\n`python -m benchmarks.planner.pipeline --record`\n\n{summary(rows)}\n"
    )


if __name__ == "__main__":
    main()
