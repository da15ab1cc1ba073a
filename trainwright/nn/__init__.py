"""Modules that the algorithms call for."""

from .sampled_linear import GradientNorms, SampledLinear, chosen_rows, sample_activations
from .sampled_matmul import sampled_matmul
from .stable_embedding import StableEmbedding

__all__ = ["GradientNorms", "SampledLinear", "StableEmbedding", "chosen_rows", "sample_activations", "sampled_matmul"]
