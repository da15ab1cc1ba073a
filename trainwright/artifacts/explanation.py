"""What `explain` answers: a plan, and for each of its decisions what it costs and what else there was."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan


@dataclass(frozen=True)
class Alternative:
    """The best other option of a decision while all others stay.

    `estimated_extra_s` adds up what the option takes and what its changes of layout take; it knows neither overlap nor memory.
    The rest is simulated, where the explanation is of few decisions; `refused` says why an option cannot run.
    """

    option: tuple[str, ...]
    estimated_extra_s: float
    step_s: float | None = None
    peak_bytes: int | None = None
    sampled: float = 0.0
    """The share of its rows that a linear map would keep; 0: all."""
    refused: str = ""


@dataclass(frozen=True)
class ExplainedDecision:
    """Why one decision is as it is. Seconds are per step, over all blocks."""

    key: str
    is_param: bool
    option: tuple[str, ...]
    """Per mesh axis: the loop that an op splits, or a parameter's layout at rest."""
    compute_s: float
    comm_s: float
    """Its own changes of layout and those of its readers."""
    saved_bytes: int
    """What it would keep for the backward, were everything kept; parameters: bytes at rest with states."""
    recomputed: str
    """Which blocks rederive what it leaves."""
    offloaded: str
    """Which blocks keep it off the device; of a parameter, its optimizer state."""
    alternative: Alternative | None
    """None: there is no other option."""
    sampled: float = 0.0
    """The share of its rows that a linear map keeps for the gradient of its weight, which is then an estimate; 0: exact."""
    variance: float = 0.0
    """The variance of that estimate in Σ_i ‖g_i‖² ‖x_i‖², where all rows have the same norm."""
    even_at: BreakEven | None = None
    """Of experts: None where rows that depend on the data change nothing between its options."""


@dataclass(frozen=True)
class BreakEven:
    """The imbalance of experts at which two splits take as long, by the sum of their parts."""

    imbalance: float
    below: tuple[str, ...]
    """The split that is faster where routing is more even; its rows depend on the data."""
    above: tuple[str, ...]
    """The one that is faster where it is more skewed, as its rows are known."""


@dataclass(frozen=True)
class ExplainedCut:
    """Why a stage begins where it does: the next best place, and by how much the step would be longer; reruns chosen anew."""

    stage: int
    begins: str
    other: str | None
    """None: none of those that were tried fits, or there is none."""
    extra_s: float | None
    num_tried: int


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`, as rows and as text."""

    plan: Plan
    rows: tuple[ExplainedDecision, ...]
    cuts: tuple[ExplainedCut, ...] = ()
    """Where stages begin, of a plan with stages."""

    def text(self) -> str:
        """Return the explanation for the terminal: the answer in three lines, then each decision."""
        from ..reports.explanation import explanation_text

        return explanation_text(self)
