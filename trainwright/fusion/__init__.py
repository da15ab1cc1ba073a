"""A sweep as one model: B models of one shape train as one, each as it would alone."""

from __future__ import annotations

from .alike import fusible
from .array import Fused
from .model import FusedModel, fuse
from .optimizer import FusedOptimizer, FusedSchedule, optimizer, schedule
from .streams import Streams

__all__ = [
    "Fused",
    "FusedModel",
    "FusedOptimizer",
    "FusedSchedule",
    "Streams",
    "fuse",
    "fusible",
    "optimizer",
    "schedule",
]
