"""Trains with parameters, gradients and states that rest on disks or the host and are updated during the backward."""

from .options import TierOptions
from .tier import Tier

__all__ = ["Tier", "TierOptions"]
