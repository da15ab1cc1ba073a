"""The models that the runtime is timed on: a few layers of real architectures, at widths and batches where work is done."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.models import zoo

SIZES: dict[str, dict[str, Any]] = {
    "gpt2-256": {"name": "gpt2-tiny", "batch_size": 8, "seq_len": 128, "n_embd": 256, "n_layer": 4, "n_head": 8,
                 "vocab_size": 4096},
    "gpt2-512": {"name": "gpt2-tiny", "batch_size": 8, "seq_len": 128, "n_embd": 512, "n_layer": 4, "n_head": 8,
                 "vocab_size": 4096},
    "llama-256": {"name": "llama-tiny", "batch_size": 8, "seq_len": 128, "hidden_size": 256, "intermediate_size": 688,
                  "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096},
    "llama-512": {"name": "llama-tiny", "batch_size": 8, "seq_len": 128, "hidden_size": 512, "intermediate_size": 1376,
                  "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096},
    "bert-256": {"name": "bert-tiny", "batch_size": 8, "seq_len": 128, "hidden_size": 256, "intermediate_size": 1024,
                 "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096},
    "t5-256": {"name": "t5-tiny", "batch_size": 8, "seq_len": 128, "d_model": 256, "d_ff": 1024, "d_kv": 32, "num_heads": 8,
               "num_layers": 2, "num_decoder_layers": 2, "vocab_size": 4096},
    "vit-256": {"name": "vit-tiny", "batch_size": 16, "hidden_size": 256, "intermediate_size": 1024,
                "num_hidden_layers": 6, "num_attention_heads": 8, "image_size": 96, "patch_size": 8},
}  # fmt: skip
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout_prob",
            "attention_probs_dropout_prob")  # fmt: skip


def build(size: str, device: str = "cpu") -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and its global batch, dropout off: contenders must do the same arithmetic."""
    model, batch = zoo.build(**SIZES[size], device=device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model, batch


def part(batch: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return a rank's samples."""
    return {
        name: value.chunk(num_ranks)[rank].contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
