"""Learning rates, momenta and batch sizes over a run, one schedule a file."""

from .batch_curvature import batch_curvature, batch_ggn_curvature, saturation_batch, scaled_lr
from .batch_size import AdaptiveBatchSize, GrowingBatchSampler
from .gradient_noise import GradientNoise, measure_noise
from .gradient_norms import GradientNormLog
from .lanczos_lr import LanczosLR
from .last_iterate import bound_factors, last_iterate_bound
from .linear import LinearDecay, ScheduledFactors
from .refined import RefinedSchedule, refined_weights, schedule_of_weights
from .sample_gradients import sample_gradients

__all__ = [
    "AdaptiveBatchSize",
    "GradientNoise",
    "GradientNormLog",
    "GrowingBatchSampler",
    "LanczosLR",
    "LinearDecay",
    "RefinedSchedule",
    "ScheduledFactors",
    "batch_curvature",
    "batch_ggn_curvature",
    "bound_factors",
    "last_iterate_bound",
    "measure_noise",
    "refined_weights",
    "sample_gradients",
    "saturation_batch",
    "scaled_lr",
    "schedule_of_weights",
]
