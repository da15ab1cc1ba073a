"""A planning question on one mesh, for the benchmarks."""

from __future__ import annotations

from typing import Any

from trainwright import optim
from trainwright.artifacts import Cluster, ModelRef
from trainwright.capture.export import capture
from trainwright.hardware import resolve
from trainwright.models import zoo
from trainwright.planner.task import Place, Task
from trainwright.program.program import Program, build_program


def place_of(model: str, options: dict[str, Any], hardware: str, mesh: tuple[int, ...]) -> Place:
    """Return the place of a zoo model on `mesh`, trained with AdamW, without a budget."""
    return place_on(build_program(capture(*zoo.build(model, **options))), resolve(hardware), mesh)


def place_on(program: Program, cluster: Cluster, mesh: tuple[int, ...]) -> Place:
    """Return the place of a program on `mesh`, trained with AdamW, without a budget."""
    task = Task(
        program, ModelRef(name="zoo"), cluster, None, "adamw", optim.record("adamw"),
        lambda params: optim.create("adamw", params), mesh=mesh,
    )  # fmt: skip
    return task.places[0]
