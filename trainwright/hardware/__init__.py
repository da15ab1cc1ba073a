"""Names, files and measurements → `Cluster`; and what a collective costs on it."""

from ..launch.cores import threads_each
from .calibrate import calibrate
from .collectives import KINDS, Collective, seconds
from .presets import DEVICES, GRAMMAR, resolve

__all__ = ["DEVICES", "GRAMMAR", "KINDS", "Collective", "calibrate", "resolve", "seconds", "threads_each"]
