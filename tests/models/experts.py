"""Tiny mixtures of experts of several families, with random weights: routers that start at zero would route nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

_TINY = {
    "vocab_size": 331, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_DEEPSEEK = {
    "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_LOCAL = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
_GLOBAL = {"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", _LOCAL),
    "qwen2_moe": ("Qwen2Moe", {**_GLOBAL, "shared_expert_intermediate_size": 96}),
    "qwen3_moe": ("Qwen3Moe", {**_GLOBAL, "head_dim": 16}),
    "olmoe": ("Olmoe", {"intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "gpt_oss": ("GptOss", {**_LOCAL, "head_dim": 16}),
    "phimoe": ("Phimoe", _LOCAL),
    "granitemoe": ("GraniteMoe", _LOCAL),
    "llama4": (
        "Llama4",
        {
            **_LOCAL,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
        },
    ),
}


def build(
    family: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[nn.Module, Any]:
    """A model of two layers that runs its experts by a loop over those that are hit, and a batch for it."""
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}TextConfig" if family == "llama4" else f"{name}Config")
    made = config(**{**_TINY, **own, **settings})
    made._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{name}ForCausalLM")(made).to(dtype)
        ids = torch.randint(0, 331, (4, 32)) if device == "cpu" else torch.empty(4, 32, dtype=torch.long)
    if device == "cpu":
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                norm = "norm" in key and parameter.dim() == 1
                random = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(1.0 + 0.1 * random if norm else 0.05 * random)
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


class Dense(nn.Module):
    """A mixture of experts as one writes it by hand: every expert sees every token, and the router weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 32, 64) / 6)
        self.down = nn.Parameter(torch.randn(4, 64, 32) / 8)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        weight, chosen = probabilities.topk(2, -1)
        routed = torch.zeros_like(probabilities).scatter(-1, chosen, weight)
        routed = routed / routed.sum(-1, keepdim=True)
        inner = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
        out = torch.einsum("bteh,ehd,bte->btd", inner, self.down, routed)
        balance = (probabilities.mean((0, 1)) * (routed > 0).float().mean((0, 1))).sum()
        return F.cross_entropy(self.head(out.mean(1)), y) + 0.04 * balance


def build_dense() -> tuple[nn.Module, dict[str, Tensor]]:
    return Dense(), {"x": torch.randn(8, 12, 32), "y": torch.randint(5, (8,))}
