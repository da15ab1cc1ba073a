"""Constrained problems: adaptive inexact SQP with sketched Newton systems, and `minimize` as in SciPy."""

from .ai_sqp import SqpOptions, solve_adasketch_newton, solve_ai_sqp
from .dialect import minimize
from .ending import ConstrainedResult
from .problem import EqualityProblem, NumpyProblem, SlackProblem, TorchProblem, Values

__all__ = [
    "ConstrainedResult",
    "EqualityProblem",
    "NumpyProblem",
    "SlackProblem",
    "SqpOptions",
    "TorchProblem",
    "Values",
    "minimize",
    "solve_adasketch_newton",
    "solve_ai_sqp",
]
