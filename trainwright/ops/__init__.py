"""What each op is: loops, local shapes, FLOPs. One file an op family, one entry an op."""

from . import (
    attention,
    convolution,
    elementwise,
    embedding,
    experts,
    fourier,
    indexing,
    linear_loss,
    loss,
    matmul,
    norms,
    recurrent,
    reductions,
    traits,  # after the rules, whose entries it completes
    views,
)
from .registry import RULES, OpRule, find, rule, signature_of
from .signature import Call, Dims, Signature, TensorSpec

__all__ = ["RULES", "Call", "Dims", "OpRule", "Signature", "TensorSpec", "find", "rule", "signature_of"]
del attention, convolution, elementwise, embedding, experts, fourier, indexing, linear_loss, loss, matmul
del norms, recurrent, reductions, traits, views
