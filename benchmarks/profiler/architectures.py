"""The architectures that the profiler is held to: Hugging Face's, small but structurally whole, and plain PyTorch.

`TABLE` has one entry a model: its name, its kind, and a function that builds it with a batch. Sizes are odd on purpose
(lengths that are no multiple of a cache line, batches of 2 and 3); nothing is downloaded. A new model is one entry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import batches, plain, sizes
from .plain import Built
from .sizes import VOCAB


@dataclass(frozen=True)
class Architecture:
    """One model of the table."""

    name: str
    kind: str
    make: Callable[[], Built]

    def build(self, seed: int = 0) -> Built:
        """Return the model in training mode, its batch, and its loss function if it needs one."""
        torch.manual_seed(seed)
        with _quiet():
            model, batch, loss_fn = self.make()
        return model.train(), batch, loss_fn


def find(name: str) -> Architecture:
    """Return the architecture called `name`; `KeyError` when there is none."""
    return {architecture.name: architecture for architecture in TABLE}[name]


def _hugging_face(kind: str, model: str, batch: Callable[..., dict[str, Any]], **fields: Any) -> Callable[[], Built]:
    """Return a builder: `kind` is the configuration's model type, `model` the class in transformers."""

    def make() -> Built:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **fields)
        return getattr(transformers, model)(config), batch(config), None

    return make


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from commenting on special tokens beyond a tiny vocabulary."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _architecture(kind: str, name: str, *args: Any, **fields: Any) -> Architecture:
    return Architecture(name, kind, _hugging_face(*args, **fields))


_decoder = partial(_architecture, "decoder")
_experts = partial(_architecture, "mixture of experts")
_state_space = partial(_architecture, "state space")
_encoder = partial(_architecture, "encoder")
_pair = partial(_architecture, "encoder-decoder")
_speech = partial(_architecture, "speech")
_vision = partial(_architecture, "vision transformer")
_convolutional = partial(_architecture, "convolutional")
_multimodal = partial(_architecture, "multimodal")

TABLE: tuple[Architecture, ...] = (
    _decoder(
        "gpt2",
        "gpt2",
        "GPT2LMHeadModel",
        batches.text,
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        **sizes.SPECIAL,
    ),
    _decoder("llama", "llama", "LlamaForCausalLM", batches.text, **sizes.LLAMA),
    _decoder("llama-padded", "llama", "LlamaForCausalLM", batches.padded_text, **sizes.LLAMA),
    _decoder("mistral", "mistral", "MistralForCausalLM", batches.text, **sizes.LLAMA, sliding_window=16),
    _decoder("qwen2", "qwen2", "Qwen2ForCausalLM", batches.text, **sizes.LLAMA, tie_word_embeddings=True),
    _decoder("qwen3", "qwen3", "Qwen3ForCausalLM", batches.padded_text, **sizes.LLAMA, head_dim=24),
    _decoder("gemma2", "gemma2", "Gemma2ForCausalLM", batches.text, **sizes.LLAMA, head_dim=16, sliding_window=16),
    _decoder("gemma3", "gemma3_text", "Gemma3ForCausalLM", batches.text, **sizes.LLAMA, head_dim=16, sliding_window=16),
    _decoder("phi3", "phi3", "Phi3ForCausalLM", batches.text, **sizes.LLAMA),
    _decoder("gpt-neox", "gpt_neox", "GPTNeoXForCausalLM", batches.text, **sizes.WIDE),
    _decoder(
        "opt",
        "opt",
        "OPTForCausalLM",
        batches.text,
        vocab_size=VOCAB,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **sizes.SPECIAL,
    ),
    _decoder(
        "bloom",
        "bloom",
        "BloomForCausalLM",
        batches.text,
        vocab_size=VOCAB,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        **sizes.SPECIAL,
    ),
    _decoder("falcon", "falcon", "FalconForCausalLM", batches.text, **sizes.WIDE, alibi=False),
    _decoder("stablelm", "stablelm", "StableLmForCausalLM", batches.text, **sizes.LLAMA),
    _decoder("olmo2", "olmo2", "Olmo2ForCausalLM", batches.text, **sizes.LLAMA),
    _decoder("cohere", "cohere", "CohereForCausalLM", batches.text, **sizes.LLAMA),
    _experts(
        "mixtral",
        "mixtral",
        "MixtralForCausalLM",
        batches.text,
        **sizes.LLAMA,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    _experts(
        "qwen2-moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        batches.text,
        **sizes.LLAMA,
        **sizes.MOE,
        shared_expert_intermediate_size=60,
    ),
    _experts("olmoe", "olmoe", "OlmoeForCausalLM", batches.text, **sizes.LLAMA, num_experts=4, num_experts_per_tok=2),
    _experts(
        "deepseek-v3",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        batches.text,
        **{**sizes.LLAMA, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=44,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    _state_space(
        "mamba",
        "mamba",
        "MambaForCausalLM",
        batches.text,
        vocab_size=VOCAB,
        hidden_size=48,
        state_size=8,
        num_hidden_layers=2,
        **sizes.SPECIAL,
    ),
    _state_space(
        "mamba2",
        "mamba2",
        "Mamba2ForCausalLM",
        batches.text,
        vocab_size=VOCAB,
        hidden_size=48,
        state_size=8,
        num_hidden_layers=2,
        head_dim=16,
        num_heads=6,
        n_groups=2,
        chunk_size=16,
        **sizes.SPECIAL,
    ),
    _state_space(
        "rwkv",
        "rwkv",
        "RwkvForCausalLM",
        batches.text,
        vocab_size=VOCAB,
        hidden_size=64,
        attention_hidden_size=64,
        num_hidden_layers=2,
        context_length=64,
        **sizes.SPECIAL,
    ),
    _encoder("bert", "bert", "BertForMaskedLM", batches.masked_text, **sizes.WIDE),
    _encoder("roberta", "roberta", "RobertaForMaskedLM", batches.masked_text, **sizes.WIDE),
    _encoder(
        "distilbert",
        "distilbert",
        "DistilBertForMaskedLM",
        batches.masked_text,
        vocab_size=VOCAB,
        dim=64,
        hidden_dim=172,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
    ),
    _encoder("albert", "albert", "AlbertForMaskedLM", batches.masked_text, **sizes.WIDE, embedding_size=24),
    _encoder("electra", "electra", "ElectraForMaskedLM", batches.masked_text, **sizes.WIDE, embedding_size=24),
    _encoder(
        "deberta-v2",
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        batches.masked_text,
        **sizes.WIDE,
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
    ),
    _encoder(
        "modernbert",
        "modernbert",
        "ModernBertForMaskedLM",
        batches.masked_text,
        **sizes.WIDE,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=16,
    ),
    _pair("t5", "t5", "T5ForConditionalGeneration", batches.pair, **sizes.T5),
    _pair("bart", "bart", "BartForConditionalGeneration", batches.pair, **sizes.BART),
    _pair("pegasus", "pegasus", "PegasusForConditionalGeneration", batches.pair, **sizes.BART),
    _pair("marian", "marian", "MarianMTModel", batches.pair, **sizes.BART, decoder_vocab_size=VOCAB),
    _speech(
        "whisper",
        "whisper",
        "WhisperForConditionalGeneration",
        batches.mel,
        **{**sizes.BART, "max_position_embeddings": 32},
        num_mel_bins=20,
        max_source_positions=30,
        max_target_positions=32,
    ),
    _speech("wav2vec2", "wav2vec2", "Wav2Vec2ForCTC", batches.wave, **sizes.WAVE),
    _speech("hubert", "hubert", "HubertForCTC", batches.wave, **sizes.WAVE),
    _vision("vit", "vit", "ViTForImageClassification", batches.image, **sizes.IMAGE, **sizes.LABELS),
    _vision("deit", "deit", "DeiTForImageClassification", batches.image, **sizes.IMAGE, **sizes.LABELS),
    _vision(
        "beit",
        "beit",
        "BeitForImageClassification",
        batches.image,
        **sizes.IMAGE,
        **sizes.LABELS,
        use_relative_position_bias=True,
    ),
    _vision("dinov2", "dinov2", "Dinov2ForImageClassification", batches.image, **sizes.IMAGE, **sizes.LABELS),
    _vision(
        "swin",
        "swin",
        "SwinForImageClassification",
        batches.large_image,
        image_size=64,
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        **sizes.LABELS,
    ),
    _vision(
        "segformer",
        "segformer",
        "SegformerForSemanticSegmentation",
        batches.segments,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 24, 40, 64],
        num_attention_heads=[1, 2, 4, 8],
        decoder_hidden_size=48,
        **sizes.LABELS,
    ),
    _convolutional(
        "resnet",
        "resnet",
        "ResNetForImageClassification",
        batches.large_image,
        embedding_size=16,
        hidden_sizes=[24, 40, 64, 96],
        depths=[1, 2, 1, 1],
        **sizes.LABELS,
    ),
    _convolutional(
        "resnet-basic",
        "resnet",
        "ResNetForImageClassification",
        batches.large_image,
        layer_type="basic",
        embedding_size=16,
        hidden_sizes=[24, 40, 64, 96],
        depths=[1, 2, 1, 1],
        **sizes.LABELS,
    ),
    _convolutional(
        "convnext",
        "convnext",
        "ConvNextForImageClassification",
        batches.large_image,
        hidden_sizes=[24, 40, 64, 96],
        depths=[1, 1, 2, 1],
        **sizes.LABELS,
    ),
    _convolutional(
        "mobilenet-v2",
        "mobilenet_v2",
        "MobileNetV2ForImageClassification",
        batches.large_image,
        depth_multiplier=0.25,
        **sizes.LABELS,
    ),
    _convolutional(
        "efficientnet",
        "efficientnet",
        "EfficientNetForImageClassification",
        batches.large_image,
        width_coefficient=0.3,
        depth_coefficient=0.3,
        hidden_dim=384,
        **sizes.LABELS,
    ),
    _multimodal(
        "clip",
        "clip",
        "CLIPModel",
        batches.image_and_text,
        text_config=sizes.CLIP_TEXT,
        vision_config=sizes.CLIP_IMAGE,
        projection_dim=48,
    ),
    _multimodal(
        "blip",
        "blip",
        "BlipForConditionalGeneration",
        batches.caption,
        text_config={**sizes.WIDE, "encoder_hidden_size": 64},
        vision_config=sizes.IMAGE,
        projection_dim=48,
    ),
    _multimodal(
        "llava",
        "llava",
        "LlavaForConditionalGeneration",
        batches.image_in_text,
        text_config={**sizes.LLAMA, "model_type": "llama"},
        vision_config={**sizes.IMAGE, "model_type": "clip_vision_model", "projection_dim": 48},
        image_token_id=330,
    ),
    Architecture("mlp", "plain", plain.mlp),
    Architecture("unet", "plain", plain.unet),
    Architecture("conv-net", "plain", plain.conv_net),
    Architecture("lstm", "plain", plain.lstm),
    Architecture("lstm-both-ways", "plain", plain.lstm_both_ways),
    Architecture("gru", "plain", plain.gru),
    Architecture("mixer", "plain", plain.mixer),
    Architecture("tied-and-frozen", "plain", plain.tied_and_frozen),
    Architecture("several-losses", "plain", plain.several_losses),
    Architecture("transformer-encoder", "plain", plain.encoder),
)
