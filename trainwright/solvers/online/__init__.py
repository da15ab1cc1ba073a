"""Online convex optimisation between stochastic and adversarial losses: learners with `predict` and `update`, sets, regret."""

from .baselines import OGD, AdaGradNorm
from .dynamic import DynamicOMD
from .exp_concave import ExpConcaveOMD
from .ftrl import OptimisticFTL, OptimisticFTRL
from .hindsight import best_in_hindsight
from .learner import Learner
from .omd import OptimisticOMD
from .sets import Ball, Box, ConvexSet, Simplex
from .solve import OnlineResult, play

__all__ = [
    "OGD",
    "AdaGradNorm",
    "Ball",
    "Box",
    "ConvexSet",
    "DynamicOMD",
    "ExpConcaveOMD",
    "Learner",
    "OnlineResult",
    "OptimisticFTL",
    "OptimisticFTRL",
    "OptimisticOMD",
    "Simplex",
    "best_in_hindsight",
    "play",
]
