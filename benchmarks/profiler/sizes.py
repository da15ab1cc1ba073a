"""Sizes that families of architectures share: fields of their configurations, small and mostly odd."""

from __future__ import annotations

from typing import Any

VOCAB = 331
"""Tokens of every language model here."""
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SPECIAL,
}
WIDE: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 44}
IMAGE: dict[str, Any] = {
    "image_size": 40,
    "patch_size": 8,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 172,
    "decoder_ffn_dim": 172,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **SPECIAL,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 172,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
WAVE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "ctc_loss_reduction": "mean",
}
CLIP_TEXT: dict[str, Any] = {**WIDE, "projection_dim": 48, "eos_token_id": 2}
CLIP_IMAGE: dict[str, Any] = {**IMAGE, "projection_dim": 48}
LABELS: dict[str, Any] = {"num_labels": 7}
