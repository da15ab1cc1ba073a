"""Model + Plan → a running module, on `torch.distributed`."""

from .batch import shard_batch
from .checkpoint import Checkpointer
from .examples import ExampleBatches
from .export import export_weights
from .module import LossOutput, ParallelModule, full_state_dict, parallelize
from .padding import PaddedDataset
from .sample_gradients import sample_gradients
from .sampler import PlanSampler
from .selected import SelectedBatches
from .train import HeldOut, train_loop, train_step
from .verify import verify
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
