"""`Profile`: what one training step of a model costs, and where."""

from __future__ import annotations

import os

from .record import Artifact, Record


class ModuleCost(Record):
    """The cost of one module and all below it."""

    path: str
    type: str = ""
    num_params: int = 0
    param_bytes: int = 0
    saved_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    num_ops: int = 0


class MemoryPoint(Record):
    """What is alive after one event of the step, by category, in bytes."""

    phase: str
    """forward, backward or update."""
    op: str
    path: str
    live_bytes: int
    param_bytes: int = 0
    grad_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: int = 0
    other_bytes: int = 0


class Profile(Artifact):
    """The answer of `trainwright.profile`. Sizes in bytes, times in seconds; one steady-state step."""

    format_version: int = 1
    model: str
    dtype: str = "fp32"
    optimizer: str = "adamw"
    target: str = "cpu"
    num_params: int
    param_bytes: int
    buffer_bytes: int = 0
    grad_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    peak_bytes: int
    peak_at: str = ""
    forward_flops: int
    backward_flops: int
    other_flops: int
    num_ops: int
    step_s: float | None = None
    """Predicted, where the hardware is known."""
    capture_s: float | None
    profile_s: float
    modules: tuple[ModuleCost, ...] = ()
    timeline: tuple[MemoryPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def table(self, depth: int = 2) -> str:
        """Return the report for the terminal: totals and a module tree of `depth` levels."""
        from ..reports.terminal import profile_table

        return profile_table(self, depth)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as an HTML file that stands alone."""
        from ..reports.html import write_profile

        write_profile(self, path)
