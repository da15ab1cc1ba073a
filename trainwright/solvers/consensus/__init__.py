"""Global minimisation from values alone: consensus-based optimisation and consensus hopping, with or without a loop of your own."""

from .cbo import CBO
from .ensemble import consensus_point
from .hopping import ConsensusHopping
from .solve import ConsensusResult, minimize
from .swarm import Swarm

__all__ = ["CBO", "ConsensusHopping", "ConsensusResult", "Swarm", "consensus_point", "minimize"]
