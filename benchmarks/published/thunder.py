"""Rows of lightning-thunder: litgpt's Llama under `fully_shard`, as benchmark_litgpt.py trains it without thunder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .llms import GatedMlp, RootMeanSquare, rotated_halves
from .program import Program, ids
from .rows import Row
from .sharded import compile_blocks, fused_adamw, hardware_of, meshes


class Attention(nn.Module):
    """litgpt's of 2024: one projection whose rows are q, k and v group by group; tables of rotations in the model's type."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        qkv = self.attn(x).view(batch, length, self.heads, 3, size).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(batch, -1, length, size) for part in qkv.split((1, 1, 1), dim=2))
        q = torch.cat((rotated_halves(q[..., :size], cos, sin), q[..., size:]), dim=-1)
        k = torch.cat((rotated_halves(k[..., :size], cos, sin), k[..., size:]), dim=-1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(found.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (RootMeanSquare(data["hidden"], wide=True) for _ in range(2))
        self.attn, self.mlp = Attention(data["hidden"], data["heads"]), GatedMlp(data["hidden"], data["ffn"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attn(self.norm_1(x), cos, sin) + x
        return self.mlp(self.norm_2(x)) + x


class Gpt(nn.Module):
    """litgpt's decoder, with the loop around it: the name `logits` is bound until the next forward has returned."""

    def __init__(self, data: dict[str, Any], length: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(data["hidden"], data["vocab"], bias=False)
        self.wte = nn.Embedding(data["vocab"], data["hidden"])
        self.layers = nn.ModuleDict({str(i): Block(data) for i in range(data["layers"])})
        self.ln_f = RootMeanSquare(data["hidden"], wide=True)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, data["head_dim"]), persistent=False)
        self.logits: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        self.logits = self.lm_head(self.ln_f(x))
        return self.logits


def thunder(row: Row) -> Program:
    data = row.data["model"]

    def make() -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = Gpt(data, row.data["seq_len"]).to(torch.bfloat16)
        if row.data["compile"].startswith("compile"):
            compile_blocks(model)
        how = {
            "mesh": meshes(row.num_gpus, 1)["dp"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            "reshard_after_forward": False,
        }
        for layer in model.layers.values():
            fully_shard(layer, **how)
        for part in (model.lm_head, model.wte, model.ln_f):
            fully_shard(part, **how)
        return fully_shard(model, **how)

    tokens = ids(row.data["micro_batch_per_gpu"], row.data["seq_len"])
    read = (
        "benchmark_litgpt.py: each block, head, embedding and last norm is a unit of fully_shard, gathered and reduced in bf16, "
        "none resharded after the forward (zero2); AdamW fused, no clipping; 16-bit logits stay bound; the whole model is "
        "compiled, which FSDP's hooks break into a graph a block: each block stands compiled by itself; litgpt/model.py: norms "
        "in fp32 by hand, rotations in the tables' 16 bits (recalled); SDPA's flash kernel (--use_sdpa is off)"
    )
    options = {"processes": row.num_gpus}
    return Program(
        make, (tokens, tokens), hardware_of(row), read, _loss, fused_adamw, options, around=row.as_compiled_then
    )


def _loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), batch[-1].reshape(-1), ignore_index=-1)
