"""Sections that the pages of profiles and plans share."""

from __future__ import annotations

from collections.abc import Sequence

from ..artifacts import MemoryPoint
from .memory_figures import memory_figure
from .page import Page, notes


def memory_section(page: Page, timeline: Sequence[MemoryPoint], peak_bytes: int, budget_bytes: int | None) -> None:
    """Add the memory over the step, by category, with its peak and the budget."""
    figure = memory_figure(timeline, peak_bytes, budget_bytes)
    timed = any(point.time_s for point in timeline)
    lead = "What is alive during each op, by what it is for. Hover for op and module; click a name to hide it."
    if not timed:
        lead += " The ops stand in order, not to scale in time."
    page.section(
        "Memory over the step",
        page.chart(figure, "memory alive over the step, by category"),
        lead=lead,
    )


def notes_section(page: Page, texts: Sequence[str]) -> None:
    """Add remarks, where there are any."""
    if texts:
        page.section("Notes", notes(texts))
