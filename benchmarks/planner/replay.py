"""Answers of the planner on a set of questions, recorded, and two records compared: what a change of the search gains or loses.

    python -m benchmarks.planner.replay record FILE [--models NAME…] [--clusters CLUSTER…] [--times X…] [--like FILE]
    python -m benchmarks.planner.replay compare BEFORE AFTER

The budgets are multiples of the smallest one that the planner finds a plan for; with `--like` they are those of another record, so
that both answer the same questions. A row is appended as it comes, and what FILE holds already is not asked again. `compare`
exits with 1 where a plan was lost, a budget exceeded, a step became slower by more than 0.1 %, or more memory made a step
slower. Processor seconds are those of `make_plan` alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.planner.places import place_of
from trainwright.artifacts import Plan, Refusal
from trainwright.planner import make_plan
from trainwright.planner.budget import budget_for
from trainwright.planner.task import Place

MODELS = ("gpt2-tiny", "bert-tiny", "t5-tiny", "llama-tiny", "vit-tiny", "resnet-tiny", "mixtral-tiny")
CLUSTERS = {"2xh100": (2,), "8xa100": (8,), "2x2xh100": (2, 2), "cpu:4": (4,)}
TIMES = (1.0, 1.02, 1.1, 1.35, 4.0)
SLOWER = 1e-3
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    asked = verbs.add_parser("record")
    asked.add_argument("file", type=Path)
    asked.add_argument("--models", nargs="+", default=MODELS, metavar="NAME[:LAYERS]")
    asked.add_argument("--clusters", nargs="+", default=("2xh100", "cpu:4"), choices=CLUSTERS)
    asked.add_argument("--times", nargs="+", type=float, default=TIMES)
    asked.add_argument("--time-limit", type=float, default=30.0, metavar="S")
    asked.add_argument("--like", type=Path, help="a record whose budgets are taken")
    both = verbs.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "record":
        record(arguments)
        return 0
    return compare(rows(arguments.before), rows(arguments.after))


def rows(path: Path | None) -> dict[tuple[str, str, float], Row]:
    """Return the rows of a record by model, cluster and budget; none where there is no record."""
    if path is None or not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
    return {(row["model"], row["cluster"], row["times"]): row for row in found}


def record(arguments: argparse.Namespace) -> None:
    """Append what was asked and is not there yet."""
    done, like = rows(arguments.file), rows(arguments.like)
    for cluster in arguments.clusters:
        for model in arguments.models:
            keys = [(model, cluster, times) for times in arguments.times]
            if like:
                keys = [key for key in keys if key in like]
            if any(key not in done for key in keys):
                budgets = {key: like[key]["budget_bytes"] for key in keys} if like else {}
                for row in _rows_of(arguments.time_limit, [key for key in keys if key not in done], budgets):
                    with arguments.file.open("a", encoding="utf8") as file:
                        file.write(json.dumps(row) + "\n")


def _rows_of(time_limit_s: float, keys: list[tuple[str, str, float]], budgets: dict[Any, int]) -> Iterator[Row]:
    place = _place(*keys[0][:2])
    least = 0 if budgets else _least_bytes(place)
    for model, cluster, times in keys:
        budget = budgets.get((model, cluster, times), int(least * times))
        asked: Row = {"model": model, "cluster": cluster, "times": times, "budget_bytes": budget}
        yield {**asked, **answer(place, budget, time_limit_s)}


def _place(model: str, cluster: str) -> Place:
    name, _, layers = model.partition(":")
    key = "num_hidden_layers" if name in ("llama-tiny", "bert-tiny") else "n_layer"
    return place_of(name, {key: int(layers)} if layers else {}, cluster, CLUSTERS[cluster])


def _least_bytes(place: Place) -> int:
    smallest = place.solver.smallest(place.settings("joint"))
    assert smallest is not None
    return budget_for(smallest.simulation.peak_bytes, place.task.divisor)


def answer(place: Place, budget_bytes: int, time_limit_s: float = 30.0) -> Row:
    """Return what the planner answers under one budget, and the processor seconds that it takes."""
    task = place.task
    began = time.process_time()
    try:
        plan: Plan | Refusal = make_plan(
            program=task.program, model_ref=task.model_ref, cluster=task.cluster, budget_bytes=budget_bytes,
            optimizer=task.optimizer, optimizer_cost=task.optimizer_cost, make_optimizer=task.make_optimizer, mesh=task.mesh,
            time_limit_s=time_limit_s,
        )  # fmt: skip
    except Refusal as refusal:
        plan = refusal
    spent = {"cpu_s": round(time.process_time() - began, 2)}
    if isinstance(plan, Refusal):
        return {**spent, "refusal": str(plan)}
    found = {"step_s": plan.predicted.step_s, "peak_bytes": plan.predicted.peak_bytes, "overlap": plan.overlap}
    return {**spent, **found, "gap": plan.solver.gap, "status": plan.solver.status}


def compare(before: dict[Any, Row], after: dict[Any, Row]) -> int:
    """Print one line a question and what became worse; return 1 where anything did."""
    worse: list[str] = []
    keys = [key for key in before if key in after]
    for key in keys:
        old, new = before[key], after[key]
        print(_line(key, old, new))
        worse += [f"{_name(key)}: {text}" for text in _faults(old, new)]
    worse += list(_rising({key: after[key] for key in keys}))
    sums = [sum(found[key]["cpu_s"] for key in keys) for found in (before, after)]
    print(f"{len(keys)} questions; processor seconds {sums[0]:.0f} → {sums[1]:.0f}; {len(worse)} worse")
    print("\n".join(worse))
    return int(bool(worse))


def _name(key: tuple[str, str, float]) -> str:
    return f"{key[0]} on {key[1]} at {key[2]:g} ×"


def _line(key: tuple[str, str, float], old: Row, new: Row) -> str:
    change = f"{new['step_s'] / old['step_s'] - 1:+8.2%}" if "step_s" in old and "step_s" in new else "        "
    told = "  →  ".join(_told(row) for row in (old, new))
    return f"{_name(key):32} {told}  {change}  {old['cpu_s']:6.2f} → {new['cpu_s']:6.2f} s"


def _told(row: Row) -> str:
    if "step_s" not in row:
        return f"{'no plan':>26}"
    gap = "   –  " if row["gap"] is None else f"{row['gap']:6.1%}"
    return f"{1e3 * row['step_s']:9.4f} ms {row['overlap']:>7} {gap}"


def _faults(old: Row, new: Row) -> Iterator[str]:
    if "step_s" not in new:
        if "step_s" in old:
            yield "the plan is lost"
        return
    if new["peak_bytes"] > new["budget_bytes"]:
        yield f"{new['peak_bytes']} bytes in {new['budget_bytes']}"
    if "step_s" in old and new["step_s"] > old["step_s"] * (1 + SLOWER):
        yield f"slower by {new['step_s'] / old['step_s'] - 1:.2%}"


def _rising(found: dict[tuple[str, str, float], Row]) -> Iterator[str]:
    best: dict[tuple[str, str], float] = {}
    for key, row in sorted(found.items()):
        if "step_s" in row:
            least = best.get(key[:2], row["step_s"])
            if row["step_s"] > least * (1 + SLOWER):
                yield f"{_name(key)}: slower than with less memory, {row['step_s'] / least - 1:+.2%}"
            best[key[:2]] = min(least, row["step_s"])


if __name__ == "__main__":
    sys.exit(main())
