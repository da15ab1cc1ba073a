"""Trains with parameters, gradients and optimizer states that rest on disks and are updated during the backward."""

from .options import TierOptions
from .tier import Tier

__all__ = ["Tier", "TierOptions"]
