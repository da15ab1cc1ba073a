"""Rows that train LoRA on a frozen base: fsdp_qlora's, and the module that torchtune's share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import CannotExpress, Program, ids
from .rows import Row
from .sharded import hardware_of, meshes


class LoraLinear(nn.Module):
    """A frozen projection and its update of low rank, scaled and added."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(self.dropout(x))) * 2.0


def without_training(model: nn.Module) -> None:
    for param in model.parameters():
        param.requires_grad_(False)


class Norm(nn.Module):
    """transformers' RMS norm of Llama: values in fp32, back to 16 bits before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * values.to(x.dtype)


class HfBlock(nn.Module):
    """transformers' Llama decoder layer of 2024-02 with peft's LoRA on q, k, v and the feed-forward's three."""

    def __init__(self, data: dict[str, Any], rank: int) -> None:
        super().__init__()
        width, inner, self.heads = data["hidden"], data["ffn"], data["heads"]
        self.q, self.k, self.v = (adapted(width, width, rank) for _ in range(3))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            adapted(width, inner, rank), adapted(width, inner, rank), adapted(inner, width, rank),
        )  # fmt: skip
        self.before_attention, self.before_mlp = Norm(width), Norm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        values = self.before_attention(x)
        q, k, v = (
            project(values).view(batch, length, self.heads, -1).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = q * cos + _turned(q) * sin, k * cos + _turned(k) * sin
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).contiguous().reshape(batch, length, width))
        values = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(values)) * self.up(values))


def adapted(width: int, out: int, rank: int) -> LoraLinear:
    return LoraLinear(nn.Linear(width, out, bias=False).requires_grad_(False), rank, dropout=0.1)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class HfLlama(nn.Module):
    """transformers' LlamaForCausalLM of 2024-02: fp32 logits, shifted copies for the loss."""

    def __init__(self, data: dict[str, Any], length: int, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(data["vocab"], data["hidden"])
        self.layers = nn.ModuleDict({str(place): HfBlock(data, rank) for place in range(data["layers"])})
        self.norm, self.head = Norm(data["hidden"]), nn.Linear(data["hidden"], data["vocab"], bias=False)
        head_dim = data["hidden"] // data["heads"]
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, head_dim), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens).requires_grad_()  # enable_input_require_grads, without which nothing is run again
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        shifted = logits[:, :-1].contiguous()
        return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[:, 1:].contiguous().view(-1))


class Rerun(nn.Module):
    """A block under reentrant checkpointing."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.block, *args, use_reentrant=True)


_RANK = 64


def fsdp_qlora(row: Row) -> Program:
    data, length = row.data["model"], row.data["seq_len"]
    if row.data["parallelism"]["kind"] == "ddp":
        raise CannotExpress(
            "FSDP without sharding keeps whole flat parameters and gradients, which fully_shard has no form for"
        )

    def make() -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = HfLlama(data, length, _RANK)
        finally:
            torch.set_default_dtype(before)
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name)
        mesh = meshes(row.num_gpus, 1)["dp"]
        for name, layer in model.layers.items():
            for module in layer.modules():
                if isinstance(module, nn.Linear) and module.weight.requires_grad:
                    fully_shard(module, mesh=mesh)
            model.layers[name] = fully_shard(Rerun(layer), mesh=mesh)
        return fully_shard(model, mesh=mesh)

    tokens = ids(row.data["micro_batch_per_gpu"], length)
    read = (
        "train.py: LoRA of rank 64 on six projections, all in bf16; each matrix of LoRA and each layer is a unit of FSDP1, which "
        "stands as fully_shard; reentrant checkpointing; transformers' Llama of the time: fp32 logits, shifted copies (recalled); "
        "gradients clipped to 0.3"
    )
    return Program(
        make, (tokens, tokens), hardware_of(row), read, None, _trained, {"processes": row.num_gpus, "clip_norm": 0.3}
    )


def _trained(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-5)
