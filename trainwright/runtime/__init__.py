"""Model + Plan → a running module, on `torch.distributed`."""

from .batch import shard_batch
from .module import LossOutput, ParallelModule, full_state_dict, parallelize
from .train import train_loop, train_step
from .verify import verify

__all__ = [
    "LossOutput",
    "ParallelModule",
    "full_state_dict",
    "parallelize",
    "shard_batch",
    "train_loop",
    "train_step",
    "verify",
]
