"""`Report`: whether a plan computes the same as one process, and what it took in memory."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Self

from pydantic import ConfigDict

from .record import Artifact, UserError, stated_version

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)


class Difference(NamedTuple):
    """One thing that was compared: what, the largest relative error, the allowed one, and where it is closest to that."""

    what: str
    error: float
    bar: float
    worst: str


class Report(Artifact):
    """The answer of `trainwright.verify`.

    A `bar_…` is the allowed error of what comes closest to breaking its own, which `worst_…` names. What was not compared
    is None: buffers of a model without any, updates without an optimizer, and all three in reports of version 1.
    """

    # an error without a bound, where something is missing or no number, is written as "Infinity" or "NaN"
    model_config = ConfigDict(ser_json_inf_nan="strings")

    has_summary: ClassVar[bool] = True
    format_version: int = FORMAT_VERSION
    num_ranks: int
    dtype: str
    max_relative_error_loss: float
    max_relative_error_gradient: float
    worst_gradient: str
    bar_loss: float
    bar_gradient: float
    max_relative_error_buffer: float | None = None
    """Of all buffers after the step, on all ranks."""
    worst_buffer: str = ""
    bar_buffer: float | None = None
    max_relative_error_update: float | None = None
    """Of what one step of the plan's optimizer changes of each parameter, given the same gradients."""
    worst_update: str = ""
    bar_update: float | None = None
    max_relative_error_evaluation: float | None = None
    """Of loss and outputs in evaluation, after the step."""
    worst_evaluation: str = ""
    bar_evaluation: float | None = None
    max_relative_error_bias: float | None = None
    """The error of the mean of several draws of the gradients that the plan estimates, in standard errors of that mean."""
    worst_bias: str = ""
    bar_bias: float | None = None
    sampled_variance: float | None = None
    """The variance of the gradient that is estimated worst, as a share of the square of its norm."""
    passed: bool
    predicted_peak_bytes: int
    rank_peak_bytes: tuple[int, ...] = ()
    """Predicted, one per rank, where ranks have programs of their own: stages of a pipeline."""
    peak_bytes: tuple[int, ...]
    """One per rank, over two whole steps with the plan's optimizer, from the allocator's own records."""
    routed_peak_bytes: tuple[int, ...] = ()
    """One per rank: the peak as it is predicted for the rows of experts that the rank was sent; none where rows are known."""
    expert_imbalance: float | None = None
    """The most rows that any rank's experts were sent in a layer, as a multiple of the even share."""
    budget_bytes: int | None
    step_s: float | None = None
    predicted_step_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def predicted_peaks(self) -> tuple[int, ...]:
        """The predicted peak of each rank that was measured."""
        return self.rank_peak_bytes or (self.predicted_peak_bytes,) * len(self.peak_bytes)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Everything that was compared, in the order of a step."""
        rows = [
            ("loss", self.max_relative_error_loss, self.bar_loss, ""),
            ("gradients", self.max_relative_error_gradient, self.bar_gradient, self.worst_gradient),
            ("bias of sampled gradients", self.max_relative_error_bias, self.bar_bias, self.worst_bias),
            ("buffers after the step", self.max_relative_error_buffer, self.bar_buffer, self.worst_buffer),
            ("optimizer's update", self.max_relative_error_update, self.bar_update, self.worst_update),
            ("evaluation", self.max_relative_error_evaluation, self.bar_evaluation, self.worst_evaluation),
        ]
        return tuple(
            Difference(what, error, bar, worst)
            for what, error, bar, worst in rows
            if error is not None and bar is not None
        )

    def table(self) -> str:
        """Return *predicted against measured* for the terminal."""
        from ..reports.terminal import report_table

        return report_table(self)

    @classmethod
    def parse(cls, text: str, where: str = "the text") -> Self:
        """Build the report from JSON `text`; `where` names the source in error messages."""
        version = stated_version(text)
        if version is not None and version not in READABLE_VERSIONS:
            raise UserError(
                f"a report of format version {' or '.join(map(str, READABLE_VERSIONS))} is needed; {where} has "
                f"{version!r}; make it anew with `verify`"
            )
        return super().parse(text, where)
