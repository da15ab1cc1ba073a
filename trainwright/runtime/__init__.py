"""Runs a planned model on `torch.distributed`: parallel modules, training loop, checkpoints and verification."""

from .batch import shard_batch
from .checkpoint.checkpoint import Checkpointer
from .checkpoint.export import export_weights
from .clipping import clip_grad_norm_
from .module import LossOutput, ParallelModule, full_state_dict, parallelize
from .sample_gradients import sample_gradients
from .tiered import Tier, TierOptions
from .training.examples import ExampleBatches
from .training.padding import PaddedDataset
from .training.sampler import PlanSampler
from .training.selected import SelectedBatches
from .training.train import HeldOut, train_loop, train_step
from .verification.verify import verify
from .weights import load_full_state_dict

__all__ = [
    "Checkpointer",
    "ExampleBatches",
    "HeldOut",
    "LossOutput",
    "PaddedDataset",
    "ParallelModule",
    "PlanSampler",
    "SelectedBatches",
    "Tier",
    "TierOptions",
    "clip_grad_norm_",
    "export_weights",
    "full_state_dict",
    "load_full_state_dict",
    "parallelize",
    "sample_gradients",
    "shard_batch",
    "train_loop",
    "train_step",
    "verify",
]
