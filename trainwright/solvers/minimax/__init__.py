"""min over x, max over y of a finite sum: variance-reduced gradient descent ascent; `theory` has the proofs' constants."""

from . import theory
from .catalyst import AccSpiderGDA
from .gda import GDA
from .solve import MinimaxResult, minimax
from .spider import SpiderGDA
from .svrg import SVRGGDA

__all__ = ["GDA", "SVRGGDA", "AccSpiderGDA", "MinimaxResult", "SpiderGDA", "minimax", "theory"]
