"""What a plan loses that was made with a wrong cost model, when it is priced with the right one.

    python -m benchmarks.planner.sensitivity [MODEL…] [--cluster CLUSTER] [--keep]

The cluster that the plan is made for computes, moves memory or sends 20 % faster or slower than the one that it is priced
for; also two of these at once, in opposite directions, which moves a choice furthest. The budget binds or does not. Bytes
do not depend on times, so a plan that fits in one fits in the other. Loss: seconds of the plan on the right cluster over
those of the plan that was made for it; within the solver's gap it may be negative.
Run it on a calm machine: searches stop by the clock.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.planner.grid import CLUSTERS, MODELS
from benchmarks.planner.places import place_on
from benchmarks.solvers import record
from trainwright.artifacts import Cluster
from trainwright.capture.export import capture
from trainwright.hardware import resolve
from trainwright.models import zoo
from trainwright.planner.best_first import solve_on
from trainwright.planner.budget import budget_for
from trainwright.planner.search.answer import Answer
from trainwright.planner.task import Place
from trainwright.program.program import Program, build_program

ERROR = 0.2
WRONG: dict[str, tuple[float, float, float]] = {
    "compute −": (1 - ERROR, 1.0, 1.0),
    "compute +": (1 + ERROR, 1.0, 1.0),
    "memory −": (1.0, 1 - ERROR, 1.0),
    "memory +": (1.0, 1 + ERROR, 1.0),
    "links −": (1.0, 1.0, 1 - ERROR),
    "links +": (1.0, 1.0, 1 + ERROR),
    "compute −, links +": (1 - ERROR, 1 - ERROR, 1 + ERROR),
    "compute +, links −": (1 + ERROR, 1 + ERROR, 1 - ERROR),
}
"""Factors of the rates of compute, of device memory, and of links."""
TIMES = (1.1, 1.35, 2.0)
"""Budgets, as multiples of the smallest, beside none."""
DEFAULT_CLUSTERS = ("8xa100", "2x2xh100")
DEFAULT = ("gpt2-tiny", "mixtral-tiny", "gpt2", "llama-3-8b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(DEFAULT))
    parser.add_argument("--keep", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--cluster", choices=DEFAULT_CLUSTERS, action="append", help="one of them alone")
    arguments = parser.parse_args()
    made: dict[str, list[dict[str, Any]]] = {}
    for model in arguments.models:
        program = build_program(capture(*zoo.build(model, **MODELS[model])))
        for cluster in arguments.cluster or DEFAULT_CLUSTERS:
            rows: list[dict[str, Any]] = []
            for row in losses(program, *CLUSTERS[cluster]):
                rows.append(row)
                print(f"{model} on {cluster}: {json.dumps(row, ensure_ascii=False)}", file=sys.stderr, flush=True)
            made[f"{model} on {cluster}"] = rows
    sections = {**(_kept() if arguments.keep else {}), **made}
    worst = max(loss for rows in sections.values() for row in rows for loss in map(row.get, WRONG) if loss is not None)
    record.write(
        "planner-sensitivity", sections, [_REMARK, f"The largest loss is {worst:.2f} %."], ("highspy",), arguments.keep
    )


def _kept() -> dict[str, list[dict[str, Any]]]:
    """Return the tables that earlier runs kept: of models that are not asked for now they stay."""
    path = record.RESULTS / "planner-sensitivity.json"
    return json.loads(path.read_text(encoding="utf8"))["sections"] if path.exists() else {}


_REMARK = (
    f"Percent of a step lost by planning with rates that are {ERROR:.0%} off, priced with the right ones. "
    "Clusters are presets; step times are a model's. Tables that the command does not name are of an earlier run."
)


def losses(program: Program, hardware: str, mesh: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget: the step of the right plan, and what each wrong one loses, in percent."""
    cluster = resolve(hardware)
    right = place_on(program, cluster, mesh)
    wrong = {name: place_on(program, scaled(cluster, *factors), mesh) for name, factors in WRONG.items()}
    smallest = right.solver.smallest(right.settings("joint"))
    assert smallest is not None
    least = budget_for(smallest.simulation.peak_bytes, right.task.divisor)
    for budget in (*(int(least * times) for times in TIMES), None):
        best_s = _seconds(right, right, budget)
        row: dict[str, Any] = {"budget MiB": "none" if budget is None else budget / 2**20}
        row["step ms"] = None if best_s is None else 1e3 * best_s
        for name, place in wrong.items():
            seconds = _seconds(place, right, budget)
            row[name] = None if seconds is None or best_s is None else 100 * (seconds / best_s - 1)
        yield row


def scaled(cluster: Cluster, compute: float, memory: float, links: float) -> Cluster:
    """Return the cluster with other rates."""
    device = cluster.device
    flops = {dtype: compute * rate for dtype, rate in device.flops_per_s.items()}
    convolutions = {dtype: compute * rate for dtype, rate in device.conv_flops_per_s.items()}
    rates = {"flops_per_s": flops, "conv_flops_per_s": convolutions}
    rates["bandwidth_bytes_per_s"] = memory * device.bandwidth_bytes_per_s
    sends = [
        link.model_copy(
            update={"bandwidth_bytes_per_s": links * link.bandwidth_bytes_per_s, "latency_s": link.latency_s / links}
        )
        for link in cluster.links
    ]
    return cluster.model_copy(update={"device": device.model_copy(update=rates), "links": tuple(sends)})


def _seconds(planned: Place, priced: Place, budget: int | None) -> float | None:
    """Return what a step of the plan made at one place takes at another."""
    planned.task.budget_bytes = budget
    answer = solve_on(planned, "joint")
    return priced.price(planned.overlapped(answer)[0].simulation).step_s if isinstance(answer, Answer) else None


if __name__ == "__main__":
    main()
