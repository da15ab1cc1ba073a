"""Rows of nanoGPT: GPT-2 as model.py of 2023-02 writes it, compiled whole, under DDP."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Program, ids
from .rows import Row
from .sharded import hardware_of


class Norm(nn.Module):
    """Layer norm without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = Norm(width), Norm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(found.transpose(1, 2).contiguous().view(batch, length, width))
        hidden = self.c_fc(self.ln_2(x))
        gelu = (
            0.5 * hidden * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (hidden + 0.044715 * torch.pow(hidden, 3.0))))
        )
        return x + self.c_proj(gelu)


class Gpt(nn.Module):
    """The model with its loss, as forward returns both."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__()
        width = data["hidden"]
        self.wte, self.wpe = nn.Embedding(data["vocab"], width), nn.Embedding(data["max_positions"], width)
        self.h = nn.ModuleList(Block(width, data["heads"]) for _ in range(data["layers"]))
        self.ln_f, self.lm_head = Norm(width), nn.Linear(width, data["vocab"], bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


class Accumulated(nn.Module):
    """The loop's micro-batches, of which the last alone exchanges gradients."""

    def __init__(self, model: nn.Module, num_parts: int) -> None:
        super().__init__()
        self.model, self.num_parts, self.count = model, num_parts, 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.count += 1
        self.model.require_backward_grad_sync = self.count % self.num_parts == 0
        return self.model(tokens, targets) / self.num_parts


def nanogpt(row: Row) -> Program:
    num_parts = row.data["accumulation"]

    def make() -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        return Accumulated(DistributedDataParallel(torch.compile(Gpt(row.data["model"]))), num_parts)

    tokens = ids(row.data["micro_batch_per_gpu"], row.data["seq_len"])
    read = (
        "train.py and model.py of 2023-02 (recalled): defaults, with flash attention from torch 2.0's nights; the whole model is "
        "one compiled graph inside DDP, whose gradients are exchanged at the last of 5 micro-batches; GELU by its formula; AdamW "
        "before it was fused; gradients clipped to 1"
    )
    options = {"processes": row.num_gpus, "accumulate": num_parts, "clip_norm": row.clip_norm, "autocast": "bf16"}
    return Program(
        make, (tokens, tokens), hardware_of(row), read, None, _adamw, options, around=row.as_compiled_then
    )  # fmt: skip


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=6e-4, foreach=True)
