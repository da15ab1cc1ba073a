"""Predicted against measured steps of two pipeline stages on two processes of this machine, beside the plan without stages.

    python -m benchmarks.runtime.stages [SIZE…] [--rounds N] [--micro-batches M] [--hardware FILE] [--remark TEXT] [--keep]

This machine is calibrated first, unless a file of it is given. All plans live in the same two processes, and every round each
takes one step.

step        the median of the slower rank's wall clock
processor   what both ranks' processors did in a step, against what the plan says that both stages do; other programs lengthen it
            less than the wall, and waiting is not in it
beside      the error of the step where the plan without stages has none: what a load that calibration did not see adds to both is
            not in it
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import trainwright as tw
from benchmarks.runtime import models, paired
from benchmarks.runtime.stepping import stepper
from benchmarks.solvers import record
from trainwright.artifacts import Plan, Refusal
from trainwright.launch import run_processes
from trainwright.planner.pipeline.price import schedule_of

ALONE = "no stages"
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
BAR = 0.05


def main() -> None:
    """Measure and print; with `--keep` write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=["gpt2-256", "llama-512", "bert-256", "t5-256"])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--hardware", help="a file of `calibrate`; left out, this machine is calibrated")
    parser.add_argument(
        "--remark", action="append", default=[], help="what the record says of how the machine was used"
    )
    parser.add_argument("--keep", action="store_true", help="write the record")
    arguments = parser.parse_args()
    hardware = arguments.hardware or tw.calibrate(2, progress=print)
    rows = [row for size in arguments.sizes for row in rows_of(size, hardware, arguments)]
    remarks = [
        f"The bar: a step within {BAR:.0%} of its prediction, on a machine that does nothing else.",
        f"{arguments.micro_batches} micro-batches, fp32, fused AdamW; medians of {arguments.rounds} rounds in turn.",
        "`beside`: the error of a step where that of the plan without stages is taken to be none.",
        *arguments.remark,
    ]
    record.write("runtime-stages", {"Predicted against measured": rows}, remarks, keep=arguments.keep)


def rows_of(size: str, hardware: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each order of stages, and one for the plan without any."""
    plans = plans_of(size, hardware, arguments.micro_batches)
    payload = {
        "size": size,
        "plans": {name: plan.to_json() for name, plan in plans.items()},
        "num_rounds": arguments.rounds,
    }
    times, busy = run_processes("benchmarks.runtime.stages:contest", payload, 2)[0]
    found = []
    for name, plan in plans.items():
        step_s, busy_s = statistics.median(times[name]), statistics.median(busy[name])
        found.append(
            {
                "model": size,
                "plan": name,
                "predicted ms": 1e3 * plan.predicted.step_s,
                "step ms": 1e3 * step_s,
                "error": step_s / plan.predicted.step_s - 1,
                "processor ms": 1e3 * busy_s,
                "processor error": busy_s / busy_of(plan) - 1,
            }
        )
    alone = 1 + found[0]["error"]
    return [row | {"beside": (1 + row["error"]) / alone - 1} for row in found]


def plans_of(size: str, hardware: Any, num_micro: int) -> dict[str, Plan]:
    """Return the plan without stages, and those with two in each order that the model allows."""
    model, batch = models.build(size, "meta")
    found = {ALONE: tw.plan(model, batch, hardware=hardware, mesh=2, micro_batches=num_micro)}
    for schedule in SCHEDULES:
        try:
            found[schedule] = tw.plan(
                model, batch, hardware=hardware, mesh=1, pipeline=2, pipeline_schedule=schedule, micro_batches=num_micro
            )
        except Refusal:
            continue
    return found


def busy_of(plan: Plan) -> float:
    """Return the seconds that both ranks compute and send, as predicted."""
    timeline = schedule_of(plan)
    return 2 * plan.predicted.step_s if timeline is None else sum(timeline.busy_s)


def contest(size: str, plans: dict[str, str], num_rounds: int) -> tuple[paired.Times, paired.Times]:
    """Run on every rank: all plans take their steps in turn."""
    steps = {}
    for name, text in plans.items():
        model, batch = models.build(size)
        plan = tw.Plan.parse(text)
        module = tw.parallelize(model, plan)
        steps[name] = stepper(module, plan.shard_batch(batch))
    return paired.interleave(steps, num_rounds)


if __name__ == "__main__":
    main()
