"""`Report`: whether a plan computes the same as one process, and what it took in memory."""

from __future__ import annotations

from typing import ClassVar

from .record import Artifact


class Report(Artifact):
    """The answer of `trainwright.verify`."""

    has_summary: ClassVar[bool] = True
    format_version: int = 1
    num_ranks: int
    dtype: str
    max_relative_error_loss: float
    max_relative_error_gradient: float
    worst_gradient: str
    bar_loss: float
    bar_gradient: float
    """The allowed error of the gradient that comes closest to breaking its own bar."""
    passed: bool
    predicted_peak_bytes: int
    peak_bytes: tuple[int, ...]
    """One per rank, over two whole steps with the plan's optimizer, from the allocator's own records."""
    budget_bytes: int | None
    step_s: float | None = None
    predicted_step_s: float | None = None
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Return *predicted against measured* for the terminal."""
        from ..reports.terminal import report_table

        return report_table(self)
