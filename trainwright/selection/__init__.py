"""Which examples to train on: weighted subsets, one selector a file."""

from .augmentation import AugmentedCoreset
from .craig import CRAIG, gradient_error
from .facility_location import Chosen, Distances, greedi, lazy_greedy, stochastic_greedy
from .gradients import last_layer_gradients, logit_gradients
from .reselection import Reselection, Selector
from .weighted_subset import WeightedSubset

__all__ = [
    "CRAIG",
    "AugmentedCoreset",
    "Chosen",
    "Distances",
    "Reselection",
    "Selector",
    "WeightedSubset",
    "gradient_error",
    "greedi",
    "last_layer_gradients",
    "lazy_greedy",
    "logit_gradients",
    "stochastic_greedy",
]
