"""`Run`: what a training run took, held against what its plan had predicted; `calibrate --learn` reads it."""

from __future__ import annotations

from pydantic import Field

from .cluster import Cluster
from .record import Artifact, Record


class Compared(Record):
    """One category: what the plan said, what was measured, in seconds a step or in bytes."""

    predicted: float = Field(ge=0)
    measured: float = Field(ge=0)


class Run(Artifact):
    """The first steps of a training run; times are medians of a step, the warm-up left out."""

    model: str
    optimizer: str
    num_ranks: int
    num_steps: int
    """That were measured."""
    cluster: Cluster
    """What the plan was made for."""
    fingerprint: str | None
    """Of the machine that ran it, as `calibrate` writes it; None: not a CPU run."""
    step_s: Compared
    compute_s: Compared
    """Forward, backward and reruns; where communication has no time of its own (a GPU), the whole step."""
    comm_s: Compared | None = None
    update_s: Compared | None = None
    """The optimizer's step."""
    peak_bytes: Compared | None = None
    comm_bytes: dict[str, Compared] = {}
