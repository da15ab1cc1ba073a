"""A sweep as one model: B models of one shape train as one, each as it would alone."""

from __future__ import annotations

from .alike import fusible
from .array import Fused
from .model import FusedModel, fuse
from .optimizer import FusedOptimizer, FusedSchedule, optimizer, schedule
from .space import Choice, Range, parse_space
from .streams import Streams
from .sweep import Sweep, SweepOptions, Trial, how_many_fit, peak_of, sweep

__all__ = [
    "Choice",
    "Fused",
    "FusedModel",
    "FusedOptimizer",
    "FusedSchedule",
    "Range",
    "Streams",
    "Sweep",
    "SweepOptions",
    "Trial",
    "fuse",
    "fusible",
    "how_many_fit",
    "optimizer",
    "parse_space",
    "peak_of",
    "schedule",
    "sweep",
]
