"""`trainwright check`: an edited plan, simulated anew without solving."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import Plan
from ..collecting import rarely_collecting
from .errors import FAILED, OK
from .model import ModelOptions, may_take_model, model_of_plan
from .output import HtmlOption, JsonOption, answer, quiet_stdout, remark, status
from .plan import MemoryOption, details
from .planned import Planned

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]


@may_take_model
@rarely_collecting()
def check(
    model: ModelOptions | None,
    plan_path: PlanArgument,
    memory: MemoryOption = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan with the new predictions.")
    ] = None,
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
) -> int:
    """Simulate a plan anew, for instance one edited by hand: does it still fit, and what does it cost?"""
    with quiet_stdout(), status(f"checking {plan_path}"):
        import trainwright as tw

        plan = Plan.from_json(plan_path)
        planned = Planned(plan, model_of_plan(plan, model))
        with planned.subject() as subject:
            found = tw.check(plan, **subject, memory=memory)
        if output is not None:
            found.to_json(output)
        if html_path is not None:
            from ..reports.html import write_plan

            write_plan(found, html_path, **details(found, planned.loaded))
    answer(found.table(), found.to_json, json_path)
    return _verdict(found)


def _verdict(plan: Plan) -> int:
    from ..reports.units import format_bytes

    peak, budget = plan.predicted.peak_bytes, plan.budget_bytes
    if budget is None or peak <= budget:
        return OK
    remark(
        f"error: a peak of at most {format_bytes(budget)} is needed; the plan's is {format_bytes(peak)}, "
        f"{format_bytes(peak - budget)} more; recompute more, or make the plan again"
    )
    return FAILED
