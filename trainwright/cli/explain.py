"""`trainwright explain`: why a plan decides as it does."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import Plan
from ..collecting import rarely_collecting
from .check import PlanArgument
from .model import ModelOptions, may_take_model, model_of_plan
from .output import answer, quiet_stdout, status
from .planned import Planned


@may_take_model
@rarely_collecting()
def explain(
    model: ModelOptions | None,
    plan_path: PlanArgument,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A module or tensor of the plan.", show_default=False)
    ] = None,
) -> None:
    """Say why this layout and not that, what binds, and what time is paid for memory."""
    with quiet_stdout(), status(f"explaining {plan_path}"):
        import trainwright as tw

        plan = Plan.from_json(plan_path)
        with Planned(plan, model_of_plan(plan, model)).subject() as subject:
            found = tw.explain(plan, **subject, key=key)
    answer(found.text(), lambda: None, None)
