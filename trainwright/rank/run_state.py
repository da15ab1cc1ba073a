"""Holds the state of one run of a local program other than its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .buckets import Flights, Plain
from .reshard import Pending

Finish = Callable[[], object]
"""Waits for the value of a loss, and writes it into the loss."""


@dataclass(frozen=True)
class RunState:
    """The modes of one run, and its communication in flight."""

    seed: int = 0
    step: int = 0
    training: bool = True
    dropout: bool = True
    """False if the run treats every dropout probability as zero, for comparisons."""
    sampling: bool = True
    """False if the run computes every sampled map in its exact form, for comparisons."""
    flights: Flights = field(default_factory=dict)
    """The buckets in flight in this run."""
    rest: Plain = field(default_factory=Plain)
    """Converts a bucket's parameters from their form at rest to what a step reads, and their gradients back."""
    sums: dict[int, Pending] = field(default_factory=dict)
    """The sums that were issued early, by the instruction that waits for each."""
    late: list[Finish] | None = None
    """Collects the waits for the loss's value if nothing reads it before the end of the step; None: they are done at once."""
    later: Any = None
    """Collects the operands of postponed weight gradients (`split_backward.LaterGradients`); None: none are postponed."""
    micro: int = 0
    """The index of the micro-batch within the step; each micro-batch draws its own random numbers."""
    known: Mapping[int, Any] = field(default_factory=dict)
    """The values that are computed before the run, if a step takes several runs (`accumulate`)."""
    factors: Mapping[int, Any] = field(default_factory=dict)
    """The factors that turn a micro-batch's sum over labels into its part of the mean, by the value that is multiplied."""

    @property
    def draw(self) -> tuple[int, ...]:
        """Return the seed of this run's random numbers, to which each op adds its own place."""
        return (self.seed, self.step, self.micro) if self.micro else (self.seed, self.step)


BoundCall = Callable[[dict[int, Any], RunState], None]
"""An instruction that is bound to run: it reads its inputs from an environment of values, and adds its outputs to it."""
