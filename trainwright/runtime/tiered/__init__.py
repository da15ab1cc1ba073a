"""Training whose parameters, gradients and optimizer states rest on disks, updated beside the backward."""

from .options import TierOptions
from .tier import Tier

__all__ = ["Tier", "TierOptions"]
