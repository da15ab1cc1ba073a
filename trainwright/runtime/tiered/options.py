"""Options of a run whose state rests on disks or in the host's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...artifacts import Plan, UserError
from ...tiers import Policy, StoreOptions

ORDERS = ("during", "after")
WINDOW_BYTES = 2**30


@dataclass(frozen=True)
class TierOptions:
    """Configures how a planned module's state rests on disks, or in the host's memory.

    folders: empty folders over which everything is striped; or, with `resume`, those of an earlier run.
    host: in place of folders, the memory of the device's host; what a run leaves behind is then its last checkpoint.
    window_bytes: the most bytes of parameters, gradients and states in memory: those prefetched, waiting for their update, or
    being written. One parameter's update may exceed it alone. Default: the plan's, else 1 GiB.
    keep_bytes: the bytes of parameters and states that stay in memory, the last ones of the forward first: they are written,
    and never read. Default: 0. A plan that was made for a tier says itself what stays.
    update: `during` the backward, as soon as a gradient is complete, or `after` it, with the gradients on the tier meanwhile
    (as ZeRO-Infinity does).
    num_workers: the threads that run updates. worker_cores: the cores reserved for them; None: the system chooses.
    clip_previous_norm: the norm to which gradients are clipped, measured by the previous step's norm; the first step is not
    clipped.
    commit_every: every so many steps the run can be resumed from; other steps write only what does not stay in memory.
    store: the options of reads and writes.

    Of a plan that was made for a tier, `update` and `commit_every` are the plan's too; what is given has to agree with it.
    """

    folders: Sequence[str | os.PathLike[str]] = ()
    window_bytes: int | None = None
    keep_bytes: int | None = None
    update: str | None = None
    num_workers: int = 1
    worker_cores: Sequence[int] | None = None
    clip_previous_norm: float | None = None
    commit_every: int | None = None
    resume: bool = False
    store: StoreOptions = field(default_factory=StoreOptions)
    host: bool = False

    def __post_init__(self) -> None:
        if self.host and (self.folders or self.resume):
            what = "resume" if self.resume else "folders"
            raise UserError(
                f"a tier in the host's memory has no {what}; got {what}={getattr(self, what)!r}; leave it out"
                + (", and go on from a checkpoint" if self.resume else "")
            )
        if self.update is not None and self.update not in ORDERS:
            raise UserError(
                f"an order of the update is needed, {' or '.join(ORDERS)} the backward; got {self.update!r}; try during"
            )
        for name, least in (("window_bytes", 1), ("keep_bytes", 0), ("num_workers", 1), ("commit_every", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise UserError(f"{name} of at least {least} is needed for a tier; got {getattr(self, name)}; raise it")
        if self.clip_previous_norm is not None and self.clip_previous_norm <= 0:
            raise UserError(f"a norm above 0 is needed to clip to; got {self.clip_previous_norm}; try 1.0")

    @property
    def place(self) -> str:
        """Return `host` or `disk`."""
        return "host" if self.host else "disk"

    def under(self, plan: Plan) -> TierOptions:
        """Return the options with the plan's in place of those that are not given; `UserError` where the two disagree."""
        if plan.tier is not None and plan.tier.place != self.place:
            wanted = "no folders" if plan.tier.place == "host" else "folders"
            raise UserError(
                f"the tier that was planned is needed, {plan.tier.place}; got {self.place}; give {wanted}, or plan again with "
                f"--tier {self.place}"
            )
        if plan.tier is None:
            own: dict[str, Any] = {"window_bytes": WINDOW_BYTES, "keep_bytes": 0, "update": "during", "commit_every": 1}
        else:
            own = {name: getattr(plan.tier, name) for name in ("window_bytes", "update", "commit_every")}
            if self.keep_bytes not in (None, plan.tier.keep_bytes):
                raise UserError(
                    f"what this plan keeps in memory is needed, {plan.tier.keep_bytes} bytes; got keep_bytes={self.keep_bytes}; "
                    "leave it out, or plan again with another"
                )
        for name, value in own.items():
            given = getattr(self, name)
            if plan.tier is not None and given not in (None, value):
                raise UserError(
                    f"the {name} that was planned is needed, {value}; got {given}; leave it out, or plan again with another"
                )
        return replace(self, **{name: value for name, value in own.items() if getattr(self, name) is None})

    def policy(self) -> Policy:
        """Return what of these a prediction depends on; all of it has to be given (`under`)."""
        assert self.window_bytes is not None
        assert self.update is not None
        assert self.commit_every is not None
        return Policy(self.window_bytes, self.keep_bytes, self.update, self.commit_every, self.place)
