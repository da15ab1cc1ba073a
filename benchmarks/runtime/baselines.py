"""What an expert writes by hand on torch's own modules: the contenders that our plans are held against."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def ddp(model: nn.Module) -> nn.Module:
    """Data parallelism; gradients are views of the buckets, which saves a copy."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model."""
    return [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]


def fsdp(model: nn.Module, reshard_after_forward: bool = True) -> nn.Module:
    """ZeRO-3, block by block; without `reshard_after_forward` gathered parameters stay until the backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()] if hasattr(model, "lm_head") else []
    if len({end.weight for end in ends}) == 2:  # untied: else both stay with the root
        for end in ends:
            fully_shard(end, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


def megatron(model: nn.Module) -> nn.Module:
    """Tensor parallelism of a Llama: columns then rows in attention and in the MLP, the vocabulary split at both ends."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # As one replicated DTensor, an input has its several readers' gradients added up before they are reduced.
    given = {"hidden_states": Replicate()}
    layer = {
        "self_attn": PrepareModuleInput(input_kwarg_layouts=given, desired_input_kwarg_layouts=given),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for block in blocks(model):
        parallelize_module(block, mesh, layer)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    return model
