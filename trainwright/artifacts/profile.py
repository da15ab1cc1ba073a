"""`Profile`: what one training step of a model costs, and where."""

from __future__ import annotations

import os
from typing import ClassVar, Self

from .record import Artifact, Record, UserError, stated_version

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)


class ModuleCost(Record):
    """The cost of one module and all below it."""

    path: str
    type: str = ""
    num_params: int = 0
    param_bytes: int = 0
    saved_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    num_ops: int = 0
    forward_s: float | None = None
    backward_s: float | None = None
    at_peak_bytes: dict[str, int] = {}
    """Alive at the peak of the step, by category."""


class OpCost(Record):
    """The calls of one op in one module, or in the same module of all repeated blocks, in one phase of the step."""

    op: str
    path: str
    """The numbers of repeated blocks are written `*`."""
    phase: str
    calls: int
    flops: int = 0
    moved_bytes: int = 0
    """Read and written."""
    time_s: float | None = None


class MemoryPoint(Record):
    """What is alive after one event of the step, by category, in bytes."""

    phase: str
    """forward, backward or update."""
    op: str
    path: str
    live_bytes: int
    param_bytes: int = 0
    grad_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: int = 0
    other_bytes: int = 0
    time_s: float = 0.0
    """Of the event; zero where the hardware is not known."""


class SweepPoint(Record):
    """The totals of a profile with one size of the batch changed."""

    axis: str
    """batch-size or seq-len."""
    value: int
    peak_bytes: int
    saved_bytes: int
    forward_flops: int
    backward_flops: int
    step_s: float | None = None


class Remedy(Record):
    """One or more changes that were profiled because the step does not fit."""

    name: str
    peak_bytes: int
    saving_bytes: int
    fits: bool
    step_s: float | None = None
    options: tuple[str, ...] = ()
    """What to add to the command line, where that can be said."""


class Fit(Record):
    """Whether the step fits into a memory budget, and what would make it fit."""

    budget_bytes: int
    fits: bool
    remedies: tuple[Remedy, ...] = ()
    not_tried: tuple[str, ...] = ()
    """What could not be tried, and why."""
    largest_that_fits: dict[str, int] = {}
    """By axis of the sweep; an axis of which no value fits is left out."""


class Compiled(Record):
    """What `torch.compile` has made of a step's forward and backward."""

    num_graphs: int
    """Forward and backward ones; 2 where the model is one graph."""
    num_ops: int
    """Calls of ATen ops in them, views left out."""
    num_kernels: int
    """That they run as."""
    pool_bytes: int | None = None
    """Reserved by CUDA graphs for themselves, within `reserved_bytes`; None without them."""


class Profile(Artifact):
    """The answer of `trainwright.profile`. Sizes in bytes, times in seconds; one steady-state step."""

    has_summary: ClassVar[bool] = True
    format_version: int = FORMAT_VERSION
    model: str
    dtype: str = "fp32"
    optimizer: str = "adamw"
    target: str = "cpu"
    num_params: int
    param_bytes: int
    buffer_bytes: int = 0
    grad_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    peak_bytes: int
    peak_at: str = ""
    breakdown: dict[str, int] = {}
    """Bytes alive at the peak, by category."""
    reserved_bytes: int | None = None
    """What a GPU's caching allocator asks of the device at most, one step's fragmentation included; None on a CPU."""
    forward_flops: int
    backward_flops: int
    other_flops: int
    num_ops: int
    step_s: float | None = None
    """Predicted, where the hardware is known."""
    capture_s: float | None
    profile_s: float
    notes: tuple[str, ...] = ()
    fit: Fit | None = None
    """The answer to `--fits`."""
    sweep: tuple[SweepPoint, ...] = ()
    """The answer to `--sweep`."""
    modules: tuple[ModuleCost, ...] = ()
    ops: tuple[OpCost, ...] = ()
    """The hottest, by time or else by FLOPs, of those that move data; not all."""
    timeline: tuple[MemoryPoint, ...] = ()
    compiled: Compiled | None = None

    def table(self, depth: int = 2, sort: str | None = None) -> str:
        """Return the report for the terminal: totals and a module tree of `depth` levels.

        sort: `memory`, `time`, `flops` or `params`, the largest first; None is the model's own order.
        """
        from ..reports.terminal_profile import profile_table

        return profile_table(self, depth, sort)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as an HTML file that stands alone."""
        from ..reports.html_profile import write_profile

        write_profile(self, path)

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated step for `chrome://tracing` or Perfetto; `UserError` when its time is not predicted."""
        from ..reports.trace import write_trace

        write_trace(self, path)

    def _render(self) -> str:
        """One line an entry of the long lists; the timeline, the longest, without what is zero."""
        lists = {
            "modules": [row.model_dump_json() for row in self.modules],
            "ops": [row.model_dump_json() for row in self.ops],
            "timeline": [row.model_dump_json(exclude_defaults=True) for row in self.timeline],
        }
        head = self.model_dump_json(indent=1, exclude=set(lists)).rstrip("}").rstrip()
        parts = [f' "{name}": [' + ",".join(f"\n  {row}" for row in rows) + "]" for name, rows in lists.items()]
        return ",\n".join((head, *parts)) + "\n}\n"

    @classmethod
    def parse(cls, text: str, where: str = "the text") -> Self:
        """Build the profile from JSON `text`; `where` names the source in error messages."""
        version = stated_version(text)
        if version is not None and version not in READABLE_VERSIONS:
            raise UserError(
                f"a profile of format version {' or '.join(map(str, READABLE_VERSIONS))} is needed; {where} has "
                f"{version!r}; make it again with `profile`"
            )
        return super().parse(text, where)
