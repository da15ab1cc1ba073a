"""Recipes and joint plans on a grid of models, clusters and budgets: what fits, what it takes, what joint gains.

    python -m benchmarks.planner.grid [CLUSTER…] [--models NAME…] [--seconds S] [--keep]

The budgets are multiples of the smallest that the planner finds a plan for. Each row is appended to
`benchmarks/results/planner-grid.jsonl` as it comes; a run goes on where the last one stopped. `--keep` writes the table.
Each question has the 30 s of work that `plan` has, and no clock: a row is the same on a slow or a busy machine.
Of each row is asked: the simulated peak is within the budget; time does not rise with the budget by more than the gap;
joint is no slower than any recipe by more than its gap; on models of 12 layers and more, where the budget binds, 95 %
of it is used.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.planner.places import place_of
from benchmarks.solvers import record
from trainwright.artifacts import UserError
from trainwright.planner.best_first import solve_on
from trainwright.planner.budget import budget_for
from trainwright.planner.model.deadline import Deadline
from trainwright.planner.problem.recipes import RECIPES
from trainwright.planner.search.solve import Answer

PATH = record.RESULTS / "planner-grid.jsonl"
TIMES = (1.0, 1.02, 1.1, 1.35, 2.0, 4.0)
CLUSTERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "2xh100": ("2xh100", (2,)),
    "8xa100": ("8xa100", (8,)),
    "2x2xh100": ("2x2xh100", (2, 2)),
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {"n_layer": 12},
    "llama-tiny": {"num_hidden_layers": 12},
    "bert-tiny": {"num_hidden_layers": 12},
    "vit-tiny": {},
    "t5-tiny": {},
    "mixtral-tiny": {},
    "resnet-tiny": {},
    "gpt2": {},
    "bert-large": {},
    "llama-3-8b": {"dtype": "bf16", "batch_size": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clusters", nargs="*", metavar="CLUSTER", help=f"some of {', '.join(CLUSTERS)}; default: all")
    parser.add_argument("--models", nargs="*", metavar="NAME", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no model after so many seconds")
    parser.add_argument("--keep", action="store_true", help="write the table of all rows so far")
    arguments = parser.parse_args()
    unknown = {*arguments.clusters} - {*CLUSTERS} | {*arguments.models} - {*MODELS}
    if unknown:
        raise UserError(f"models and clusters of the grid are needed; got {', '.join(sorted(unknown))}")
    end = time.perf_counter() + arguments.seconds
    done = {(row["model"], row["cluster"]) for row in rows() if row["times"] == TIMES[-1] and row["solver"] == "joint"}
    for cluster in arguments.clusters or CLUSTERS:
        for model in arguments.models:
            if (model, cluster) not in done and time.perf_counter() < end:
                _append(solved(model, cluster))
    found = _latest(rows())
    record.write("planner-grid", _sections(found), _remarks(found), ("highspy",), arguments.keep)


def rows() -> list[dict[str, Any]]:
    """Return the rows that were recorded so far."""
    if not PATH.exists():
        return []
    return [json.loads(line) for line in PATH.read_text(encoding="utf8").splitlines()]


def solved(model: str, cluster: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget and solver."""
    hardware, mesh = CLUSTERS[cluster]
    place = place_of(model, MODELS[model], hardware, mesh)
    smallest = place.solver.smallest(place.settings("joint"))
    assert smallest is not None
    least = budget_for(smallest.simulation.peak_bytes, place.task.divisor)
    free = solve_on(place, "joint")
    assert isinstance(free, Answer)
    for times in TIMES:
        place.task.budget_bytes = int(least * times)
        for solver in RECIPES:
            began = time.process_time()
            place.task.deadline = Deadline(place.task.time_limit_s, clock_s=math.inf)
            answer = solve_on(place, solver)
            row: dict[str, Any] = {"model": model, "cluster": cluster, "times": times, "solver": solver}
            row |= {"budget_bytes": place.task.budget_bytes, "cpu_s": 0.0, "binds": False}
            if isinstance(answer, Answer):
                running, takes = place.overlapped(answer)
                row |= {
                    "step_s": takes.step_s,
                    "objective_s": answer.objective_s,
                    "peak_bytes": running.simulation.peak_bytes,
                    "gap": answer.gap or 0.0,
                    "binds": free.simulation.peak_bytes > place.task.budget_bytes,
                }
            row["cpu_s"] = round(time.process_time() - began, 2)
            yield row


def _append(found: Iterable[dict[str, Any]]) -> None:
    PATH.parent.mkdir(exist_ok=True)
    for row in found:
        with PATH.open("a", encoding="utf8") as file:
            file.write(json.dumps(row) + "\n")


def _latest(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row each: a run that was cut off is repeated from its model's beginning."""
    table = {(row["model"], row["cluster"], row["times"], row["solver"]): row for row in found}
    return list(table.values())


def _sections(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, dict[tuple[str, float], dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in found:
        groups[row["cluster"]][row["model"], row["times"]][row["solver"]] = row
    return {cluster: [_line(*key, by_solver) for key, by_solver in table.items()] for cluster, table in groups.items()}


def _line(model: str, times: float, by_solver: dict[str, dict[str, Any]]) -> dict[str, Any]:
    joint = by_solver.get("joint", {})
    best = joint.get("step_s")
    line: dict[str, Any] = {"model": model, "budget": f"{times:g} ×"}
    line["MiB"] = joint["budget_bytes"] / 2**20 if joint else ""
    line["joint ms"] = 1e3 * best if best else "–"
    line["gap %"] = 100 * joint["gap"] if best else "–"
    line["used %"] = 100 * joint["peak_bytes"] / joint["budget_bytes"] if best else "–"
    for solver in RECIPES[:-1]:
        other = by_solver.get(solver, {}).get("step_s")
        line[f"{solver} %"] = f"{100 * (other / best - 1):+.1f}" if other and best else "–"
    return line


def violations(found: list[dict[str, Any]]) -> list[str]:
    """Return what was asked of the rows and does not hold."""
    wrong = []
    steps: dict[tuple[str, str, str], float] = {}
    joint = {(row["model"], row["cluster"], row["times"]): row for row in found if row["solver"] == "joint"}
    for row in found:
        if "step_s" not in row:
            continue
        name = f"{row['model']} on {row['cluster']} at {row['times']:g} × by {row['solver']}"
        if row["peak_bytes"] > row["budget_bytes"]:
            wrong.append(f"{name}: {row['peak_bytes']} bytes in {row['budget_bytes']}")
        key = row["model"], row["cluster"], row["solver"]
        if row["step_s"] > steps.get(key, row["step_s"]) * (1 + max(row["gap"], 1e-3)):
            wrong.append(f"{name}: slower than with less memory, {row['step_s'] / steps[key] - 1:+.2%}")
        steps[key] = min(row["step_s"], steps.get(key, row["step_s"]))
        best = joint.get((row["model"], row["cluster"], row["times"]), row)
        if "step_s" not in best:
            wrong.append(f"{name}: joint has no plan")
            continue
        if row["step_s"] * (1 + max(best.get("gap", 0.0), 1e-3)) < best["step_s"]:
            wrong.append(f"{name}: joint is slower, {best['step_s'] / row['step_s'] - 1:+.2%}")
    for row in joint.values():
        deep = row["model"] in ("gpt2-tiny", "llama-tiny", "bert-tiny", "gpt2", "bert-large", "llama-3-8b")
        if row["binds"] and deep and row["peak_bytes"] < 0.95 * row["budget_bytes"]:
            share = row["peak_bytes"] / row["budget_bytes"]
            wrong.append(f"{row['model']} on {row['cluster']} at {row['times']:g} ×: {share:.1%} of the budget used")
    return wrong


def _remarks(found: list[dict[str, Any]]) -> list[str]:
    wrong = violations(found)
    return [
        "Budgets are multiples of the smallest one found. Recipes: how much longer than joint; – where none fits.",
        f"{len(found)} plans asked for; {len(wrong)} violations of what is asked of them.",
        *wrong,
    ]


if __name__ == "__main__":
    main()
