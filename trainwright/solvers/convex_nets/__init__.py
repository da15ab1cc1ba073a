"""Two-layer ReLU networks as convex programmes over activation patterns: ADMM, and scikit-learn's `fit` and `predict`."""

from .adversarial import RobustReLUClassifier
from .estimator import ReLUClassifier, ReLURegressor
from .network import TwoLayerReLU, recover
from .patterns import enumerate_patterns, sample_patterns, sufficient_patterns
from .programme import AdmmOptions, ReLUProgrammeResult, solve_relu_programme

__all__ = [
    "AdmmOptions",
    "ReLUClassifier",
    "ReLUProgrammeResult",
    "ReLURegressor",
    "RobustReLUClassifier",
    "TwoLayerReLU",
    "enumerate_patterns",
    "recover",
    "sample_patterns",
    "solve_relu_programme",
    "sufficient_patterns",
]
