"""Entropic optimal transport: Sinkhorn-Newton-Sparse and Sinkhorn in the log domain, and `sinkhorn` as in POT."""

from .dialect import sinkhorn
from .problem import Problem
from .result import TransportResult
from .sinkhorn import solve_sinkhorn
from .sns import SnsOptions, solve_sns

__all__ = ["Problem", "SnsOptions", "TransportResult", "sinkhorn", "solve_sinkhorn", "solve_sns"]
