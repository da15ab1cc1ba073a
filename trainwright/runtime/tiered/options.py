"""Options of a run whose state rests on disks."""

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
    """Configures how a planned module's state rests on disks.

    folders: empty folders over which everything is striped; or, with `resume`, those of an earlier run.
    window_bytes: the most bytes of parameters, gradients and states in memory: those prefetched, waiting for their update, or
    being written. One parameter's update may exceed it alone.
    keep_bytes: the bytes of parameters and states that stay in memory, the last ones of the forward first: they are written,
    and never read.
    update: `during` the backward, as soon as a gradient is complete, or `after` it, with the gradients on the disk meanwhile
    (as ZeRO-Infinity does).
    num_workers: the threads that run updates. worker_cores: the cores reserved for them; None: the system chooses.
    clip_previous_norm: the norm to which gradients are clipped, measured by the previous step's norm; the first step is not
    clipped.
    commit_every: every so many steps the run can be resumed from; other steps write only what does not stay in memory.
    store: the options of reads and writes.
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
