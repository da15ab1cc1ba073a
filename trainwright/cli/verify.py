"""`trainwright verify`: does a plan compute what one process computes, within the memory promised?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..artifacts import Plan, Report
from .errors import FAILED, OK
from .model import ModelOptions, as_planned, takes_model
from .output import HtmlOption, JsonOption, answer, quiet_stdout, status
from .ranks import NprocOption, OnEvent, is_first_rank, run_worker
from .train import PlanOption

WORKER = "trainwright.cli.workers:verify"


@takes_model
def verify(
    model: ModelOptions,
    plan_path: PlanOption,
    nproc: NprocOption = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="To compare in: float64 (bar 1e-9) or fp32.")
    ] = "float64",
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
) -> int:
    """Compare a plan's loss, gradients and memory peak with one process's. Exit status 1 where they differ."""
    plan = Plan.from_json(plan_path)
    with quiet_stdout(), status(f"verifying {plan_path} on {plan.num_ranks} ranks"):
        report = run_verification(as_planned(plan, model), plan, dtype, nproc)
    verdict = OK if holds(report) else FAILED
    if not is_first_rank():
        return verdict
    if html_path is not None:
        from ..reports.html import write_plan

        write_plan(plan, html_path, report=report)
    answer(report.table(), report.to_json, json_path)
    return verdict


def holds(report: Report) -> bool:
    """Return whether the plan computes the same and no rank took more than its budget."""
    return report.passed and all(peak <= (report.budget_bytes or peak) for peak in report.peak_bytes)


def run_verification(
    model: ModelOptions, plan: Plan, dtype: str, nproc: int | None, on_event: OnEvent = lambda event: None
) -> Report:
    """Run the comparison on the plan's ranks and return rank 0's report."""

    payload: dict[str, Any] = {
        "model": model.payload(),
        "plan": plan.to_json(),
        "dtype": dtype,
        "seed": model.seed or 0,
    }
    return Report.parse(json.dumps(run_worker(WORKER, payload, plan, nproc, on_event)), where="the ranks' answer")
