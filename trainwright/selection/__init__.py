"""Which examples to train on: weighted subsets, one selector a file."""

from .augmentation import AugmentedCoreset, with_strong_copies
from .craig import CRAIG, gradient_error
from .facility_location import Chosen, Distances, greedi, lazy_greedy, stochastic_greedy
from .gradients import last_layer_gradients, logit_gradients
from .largest_loss import LargestLoss
from .random_subset import RandomSubset
from .registry import Selection, selection, selections
from .reselection import Reselection, Selector
from .weighted_subset import WeightedSubset

__all__ = [
    "CRAIG",
    "AugmentedCoreset",
    "Chosen",
    "Distances",
    "LargestLoss",
    "RandomSubset",
    "Reselection",
    "Selection",
    "Selector",
    "WeightedSubset",
    "gradient_error",
    "greedi",
    "last_layer_gradients",
    "lazy_greedy",
    "logit_gradients",
    "selection",
    "selections",
    "stochastic_greedy",
    "with_strong_copies",
]
