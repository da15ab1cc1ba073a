"""`SelfCheck`: predicted against measured memory and time of several models on one machine."""

from __future__ import annotations

import statistics
from typing import ClassVar

from .record import Artifact, Record
from .report import Report


class Checked(Record):
    """One model: a steady-state step as it was predicted, and as it was measured; or why it was not measured."""

    model: str
    batch_size: int
    seq_len: int | None = None
    dtype: str
    autocast: str | None = None
    optimizer: str
    predicted_peak_bytes: int
    measured_peak_bytes: int | None = None
    """What tensors held at most, the batch excluded."""
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    """What a GPU's caching allocator had asked of the device."""
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    """The median of some steps."""
    not_measured: str = ""
    """Why there is no measurement."""

    @property
    def peak_error(self) -> float | None:
        """Predicted over measured, less 1."""
        return _error(self.predicted_peak_bytes, self.measured_peak_bytes)

    @property
    def reserved_error(self) -> float | None:
        """The same of what the allocator reserves."""
        return _error(self.predicted_reserved_bytes, self.measured_reserved_bytes)

    @property
    def step_error(self) -> float | None:
        """The same of the seconds a step."""
        return _error(self.predicted_step_s, self.measured_step_s)


class SelfCheck(Artifact):
    """The answer of `trainwright selfcheck`: rows in the order in which they were run, and what they ran on."""

    has_summary: ClassVar[bool] = False
    device: str
    """As the driver or the system names it."""
    num_devices: int
    predicted_for: str
    """The hardware that the predictions are of, and where its figures come from."""
    versions: dict[str, str]
    """Of trainwright, torch and what is under it."""
    date: str
    command: str = ""
    rows: tuple[Checked, ...]
    verification: Report | None = None
    """Of a plan over several devices; None where there is one."""
    notes: tuple[str, ...] = ()

    def median_error(self, what: str) -> float | None:
        """Return the median size of the errors of `what`: `peak`, `reserved` or `step`; None where nothing was measured."""
        found = [getattr(row, f"{what}_error") for row in self.rows]
        sizes = [abs(error) for error in found if error is not None]
        return statistics.median(sizes) if sizes else None

    def table(self) -> str:
        """Return the rows for the terminal."""
        from ..reports.selfcheck import selfcheck_table

        return selfcheck_table(self)

    def to_markdown(self) -> str:
        """Return the whole as text that can be sent as an issue: tables, versions, and the JSON of all figures."""
        from ..reports.selfcheck import selfcheck_markdown

        return selfcheck_markdown(self)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1
