"""Which examples to train on: weighted subsets, one selector a file."""

from .craig import CRAIG, gradient_error
from .facility_location import Chosen, Distances, greedi, lazy_greedy, stochastic_greedy
from .weighted_subset import WeightedSubset

__all__ = [
    "CRAIG",
    "Chosen",
    "Distances",
    "WeightedSubset",
    "gradient_error",
    "greedi",
    "lazy_greedy",
    "stochastic_greedy",
]
