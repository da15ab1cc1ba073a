"""Rows of litgpt and torchtune: decoders written out as those libraries write them.

A module that computes the same by other ops keeps other tensors, so each is spelled as in its source.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Program, ids
from .rows import Row

_CHUNK = 128


class RootMeanSquare(nn.Module):
    """RMS norm from elementwise ops; `wide` computes in fp32, as torchtune does and litgpt of 2023 does not."""

    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(width)), wide

    def forward(self, x: Tensor) -> Tensor:
        values = x.float() if self.wide else x
        scaled = values * torch.rsqrt((values * values).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class LoraQKV(nn.Linear):
    """One frozen projection to q, k and v; low-rank updates of q and v, put in place by an index."""

    def __init__(self, width: int, out: int, rank: int, bias: bool) -> None:
        super().__init__(width, out, bias=bias)
        self.dropout = nn.Dropout(0.05)
        self.lora_a = nn.Parameter(torch.zeros(2 * rank, width))
        self.lora_b = nn.Parameter(torch.zeros(2 * width, rank))
        self.register_buffer("places", torch.zeros(2 * width, dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found = F.linear(x, self.weight, self.bias)
        low = F.linear(self.dropout(x), self.lora_a)
        update = F.conv1d(low.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        found += self._padded(update) * 2.0
        return found

    def _padded(self, update: Tensor) -> Tensor:
        turned = update.transpose(0, 1)
        zeros = turned.new_zeros((*turned.shape[:-1], self.out_features)).view(-1, self.out_features)
        filled = zeros.index_copy(1, self.places, turned.reshape(-1, update.shape[-1]))
        return filled.view((*turned.shape[:-1], self.out_features)).transpose(0, 1)


class LitMlp(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)


class LitAttention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.attn = LoraQKV(width, 3 * width, 8, bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.attn(x).view(batch, length, self.heads, 3, width // self.heads).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(batch, -1, length, width // self.heads) for part in qkv.split((1, 1, 1), dim=2))
        q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(found.transpose(1, 2).reshape(batch, length, width))

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((rotated_halves(x[..., : self.rotary], cos, sin), x[..., self.rotary :]), dim=-1)


class LitBlock(nn.Module):
    def __init__(self, kind: dict[str, Any]) -> None:
        super().__init__()
        width, bias = kind["hidden"], kind["bias"]
        self.is_parallel, self.has_one_norm = kind["parallel"], kind["one_norm"]
        self.norm_1 = kind["norm"](width)
        self.norm_2 = None if self.has_one_norm else kind["norm"](width)
        self.attn = LitAttention(width, kind["heads"], kind["rotary"], bias)
        self.mlp = LitMlp(width, kind["ffn"], bias) if bias else GatedMlp(width, kind["ffn"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.norm_1(x)
        found = self.attn(first, cos, sin)
        if self.is_parallel:
            second = first if self.has_one_norm else self.norm_2(x)
            return self.mlp(second) + found + x
        x = found + x
        return self.mlp(self.norm_2(x)) + x


class LitGpt(nn.Module):
    """litgpt's GPT with LoRA on q and v; the logits come in chunks of 128 positions, and so does the loss."""

    def __init__(self, kind: dict[str, Any]) -> None:
        super().__init__()
        self.lm_head = nn.Linear(kind["hidden"], kind["vocab"], bias=kind["head_bias"])
        self.wte = nn.Embedding(kind["vocab"], kind["hidden"])
        self.h = nn.ModuleList(LitBlock(kind) for _ in range(kind["layers"]))
        self.ln_f = kind["norm"](kind["hidden"])
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(kind["block"], kind["rotary"]), persistent=False)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, cos, sin)
        return [self.lm_head(part) for part in self.ln_f(x).split(_CHUNK, dim=1)]


class LitTrained(nn.Module):
    """The loop of finetune/lora.py in its first round: the name `logits` is bound until the update."""

    def __init__(self, gpt: LitGpt) -> None:
        super().__init__()
        self.gpt = gpt
        self.logits: list[Tensor] = []

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.logits = []
        logits = [part.float() for part in self.gpt(tokens)]
        logits[-1] = logits[-1][..., :-1, :]
        self.logits = logits
        chunks = targets[..., 1:].split(_CHUNK, dim=1)
        losses = [
            F.cross_entropy(part.reshape(-1, part.shape[-1]), chunk.reshape(-1), ignore_index=-1, reduction="none")
            for part, chunk in zip(logits, chunks)
        ]
        return torch.cat(losses).mean()


_KINDS: dict[str, dict[str, Any]] = {
    "phi": {"bias": True, "head_bias": True, "parallel": True, "one_norm": True, "norm": nn.LayerNorm, "share": 0.5},
    "stablelm": {
        "bias": True, "head_bias": False, "parallel": True, "one_norm": False, "norm": nn.LayerNorm, "share": 0.25,
    },
    "llama": {
        "bias": False, "head_bias": False, "parallel": False, "one_norm": False, "share": 1.0,
        "norm": lambda width: RootMeanSquare(width, wide=True),
    },
}  # fmt: skip


def litgpt(row: Row) -> Program:
    data = row.data["model"]
    kind = dict(next(found for name, found in _KINDS.items() if name in row.id))
    kind |= {key: data[key] for key in ("layers", "hidden", "heads", "ffn", "vocab")}
    kind["block"] = data.get("max_positions") or 4096
    kind["rotary"] = int(kind["share"] * data["hidden"] // data["heads"])
    with torch.device("meta"):
        model = LitTrained(LitGpt(kind)).bfloat16()
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    tokens = ids(row.data["micro_batch_per_gpu"], row.data["seq_len"])
    read = (
        "lit_gpt/model.py, lora.py and finetune/lora.py: one projection for q, k, v with LoRA placed by index_copy; bf16 "
        "norms; logits in chunks of 128, which Fabric brings to fp32 (found by looking for what was "
        "missing, then recalled), and so is their loss; the list of logits stays "
        "bound; norms of the Llama rows in fp32 (fitted: the file read, of another date, has none); the "
        "published peak is of the longest sample, before there is an update"
    )
    return Program(model, (tokens, tokens), "a100-40gb", read, make_optimizer=_adamw, options={"accumulate": 2})


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=3e-4, foreach=True)
