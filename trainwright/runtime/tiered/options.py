"""How a run uses its disks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...artifacts import UserError
from ...tiers import StoreOptions

ORDERS = ("during", "after")
WINDOW_BYTES = 2**30


@dataclass(frozen=True)
class TierOptions:
    """How a planned module rests on disks.

    folders: empty ones, over which everything is striped; or, with `resume`, those that a run has left.
    window_bytes: of parameters, gradients and states in memory for work under way: what is read ahead, what waits for its
    update, what is on its way out. A single parameter's update is let through however large it is.
    keep_bytes: of parameters and states that stay in memory, the last of the forward first: they are written, and never read.
    update: `during` the backward, as soon as a gradient is there, or `after` it, gradients on the disk meanwhile (as
    ZeRO-Infinity orders it).
    num_workers: threads that update. worker_cores: the cores that they alone run on; None: the system says.
    clip_previous_norm: gradients are scaled to this norm as if theirs were that of the step before; 0 of the first step.
    commit_every: steps between two that can be gone on from; the others write what memory has no room for, and no more.
    store: how bytes are moved.
    """

    folders: Sequence[str | os.PathLike[str]]
    window_bytes: int = WINDOW_BYTES
    keep_bytes: int = 0
    update: str = "during"
    num_workers: int = 1
    worker_cores: Sequence[int] | None = None
    clip_previous_norm: float | None = None
    commit_every: int = 1
    resume: bool = False
    store: StoreOptions = field(default_factory=StoreOptions)

    def __post_init__(self) -> None:
        if self.update not in ORDERS:
            raise UserError(
                f"an order of the update is needed, {' or '.join(ORDERS)} the backward; got {self.update!r}; try during"
            )
        for name, least in (("window_bytes", 1), ("keep_bytes", 0), ("num_workers", 1), ("commit_every", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} of at least {least} is needed for a tier; got {getattr(self, name)}; raise it")
        if self.clip_previous_norm is not None and self.clip_previous_norm <= 0:
            raise UserError(f"a norm above 0 is needed to clip to; got {self.clip_previous_norm}; try 1.0")
