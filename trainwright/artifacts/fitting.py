"""`Fitting`: which devices can train a model, and in which way: whole, with LoRA, with QLoRA."""

from __future__ import annotations

import os
from typing import ClassVar

from .record import Artifact, Record


class FitOn(Record):
    """One way of training on one device: as asked where that fits, else with the fewest changes that make it fit."""

    device: str
    way: str
    """`full`, `lora` or `qlora`."""
    budget_bytes: int
    fits: bool
    peak_bytes: int | None = None
    """The peak of the step with `changes`; None where it cannot be profiled."""
    changes: tuple[str, ...] = ()
    """The changes that make it fit; where nothing fits, all that was tried together."""
    options: tuple[str, ...] = ()
    """The flags or lines of code that make those changes."""
    step_s: float | None = None
    samples_per_s: float | None = None
    problem: str = ""
    """Why there is no profile."""


class Fitting(Artifact):
    """The answer of `profile --hardware a,b,c`: a row for each device and way."""

    has_summary: ClassVar[bool] = False
    model: str
    dtype: str
    optimizer: str
    rows: tuple[FitOn, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True where any device fits in any way."""
        return any(row.fits for row in self.rows)

    def table(self) -> str:
        """Return the rows for the terminal."""
        from ..reports.fitting import fitting_table

        return fitting_table(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same as a page that stands alone."""
        from ..reports.fitting import write_fitting

        write_fitting(self, path)
