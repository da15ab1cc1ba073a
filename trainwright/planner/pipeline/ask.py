"""Checks a task with pipeline stages: their number, their schedules, the pins of cuts, and unsupported settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...artifacts import UserError
from ...program.stages import boundaries

if TYPE_CHECKING:
    from ..task import Task

BEGIN = re.compile(r"(?P<block>.+)=begin\((?P<stage>\d+)\)")


def check_task(task: Task) -> None:
    """Raise `UserError` for settings that stages do not support, with a way out."""
    schedules(task)
    cost = task.optimizer_cost
    if cost.num_passes != 1.0 or task.goes_again or cost.reads == "model":
        raise UserError(
            f"an optimizer that takes one forward and backward, and each parameter by itself, is needed for stages; "
            f"{task.optimizer} does not; try adamw, or plan without --pipeline"
        )
    if task.variants is None and task.program.num_runs < 2:
        raise UserError("two micro-batches or more are needed for stages; got 1; try --micro-batches auto")
    for pin in task.pins:
        if re.search(r"=(keep|recompute|offload|state-keep|state-offload)$", pin):
            raise UserError(
                f"pins of layouts, or of where stages begin, are needed beside --pipeline; {pin!r} pins what is kept, which each "
                "stage chooses; edit the plan and `check` it instead"
            )


SCHEDULES = ("1f1b", "interleaved", "zero-bubble")


def schedules(task: Task) -> tuple[str, ...]:
    """Return the names of the schedules to try; raise `UserError` for an unknown one."""
    asked = task.pipeline_schedule
    if asked == "auto":
        return SCHEDULES
    if asked not in SCHEDULES:
        raise UserError(
            f"a schedule of stages is needed, one of {', '.join(SCHEDULES)}, or auto; got {asked!r}; try auto"
        )
    return (asked,)


def numbers_of_stages(task: Task) -> list[int]:
    """Return the numbers of stages to try; raise `UserError` for an impossible one."""
    if task.pipeline == "auto":
        return task.cluster.stage_numbers
    num = task.pipeline
    if not isinstance(num, int) or num < 2:
        raise UserError(f"a number of stages is needed, 2 or more, or auto; got {num!r}; try auto")
    task.cluster.of_stage(num)
    return [num]


def begin_pins(task: Task, num_stages: int) -> dict[int, str]:
    """Return the blocks at which stages are pinned to begin, by stage; raise `UserError` for an unknown block or stage.

    `transformer.h.7=begin(1)` means that the second stage begins at that block.
    """
    found: dict[int, str] = {}
    known = boundaries(task.program)
    for pin in task.pins:
        match = BEGIN.fullmatch(pin)
        if match is None:
            if "=begin" in pin:
                raise UserError(f"a pin of a stage is BLOCK=begin(STAGE), stages counted from 0; got {pin!r}")
            continue
        block, stage = match["block"], int(match["stage"])
        if block not in known:
            raise UserError(
                f"a block at which a stage can begin is needed; {pin!r} names none; there are {', '.join(known[:6])}"
                f"{', …' if len(known) > 6 else ''}"
            )
        if not 1 <= stage < num_stages:
            raise UserError(
                f"a stage from 1 to {num_stages - 1} is needed, for stage 0 begins with the step; {pin!r} names {stage}"
            )
        found[stage] = block
    return found
