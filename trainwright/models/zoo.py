"""Real architectures with random weights, from their Hugging Face configurations; nothing is downloaded.

`_TABLE` is the zoo: one record a model. A new model is one record there.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError, needed
from ..torch_internals.dtypes import default_dtype

__all__ = ["build", "names", "parse_dtype", "table"]

Batch = dict[str, Tensor]

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
DTYPE_SYNONYMS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float64": "fp64"}


def build(
    name: str,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    dtype: str = "fp32",
    device: str = "meta",
    seed: int = 0,
    **config: Any,
) -> tuple[nn.Module, Batch]:
    """Build the zoo's model `name`, random weights and all, and a batch for it.

    batch_size, seq_len: the batch's, by default the record's; image models have no seq_len.
    dtype: of the parameters; fp32, bf16, fp16 or fp64. device: `meta` takes no memory; `cpu` has weights, seeded.
    config: overrides of the model's configuration (`num_hidden_layers=2`, `resid_pdrop=0.0`).

    Raises `UserError` for an unknown name, configuration or type.

    >>> model, batch = build("gpt2-tiny", batch_size=2)
    >>> batch["input_ids"].shape, batch["input_ids"].device
    (torch.Size([2, 32]), device(type='meta'))
    """
    record = _find(name)
    if record.kind.seq_len is None and seq_len is not None:
        raise UserError(f"a model of sequences is needed for --seq-len; {name} takes images; leave it out")
    for option, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if size is not None and size < 1:
            raise UserError(f"a {option} of 1 or more is needed; got {size}; leave it out for the default")
    made = _config(record, config, seq_len)
    torch.manual_seed(seed)
    with default_dtype(parse_dtype(dtype)), _quiet(), torch.device(device):  # a conversion afterwards would hold both
        model = _construct(record, made)
        batch = record.kind.batch(made, batch_size or record.batch_size, seq_len or record.seq_len, device)
    return model.train(), _of_dtype(batch, parse_dtype(dtype))


def names() -> tuple[str, ...]:
    """Return the names of the zoo's models.

    >>> "gpt2-tiny" in names()
    True
    """
    return tuple(record.name for record in _TABLE)


def table() -> list[dict[str, Any]]:
    """Return a row a model: name, kind, number of parameters, default batch size and sequence length."""
    return [
        {
            "name": record.name,
            "kind": record.kind.name,
            "num_params": _num_params(record),
            "batch_size": record.batch_size,
            "seq_len": record.seq_len,
        }
        for record in _TABLE
    ]


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch type called `fp32`, `bf16`, `fp16`, `fp64` (or by torch's own name); else `UserError`.

    >>> parse_dtype("bf16")
    torch.bfloat16
    """
    short = DTYPE_SYNONYMS.get(name, name)
    if short not in DTYPES:
        raise UserError(f"a dtype must be one of {', '.join(DTYPES)}; got {name!r}; choose one of these")
    return DTYPES[short]


@dataclass(frozen=True)
class _Kind:
    """What the models of one family share: class, configuration, batch; `seq_len` names the limit in the config."""

    name: str
    model: str
    config: str
    batch: Callable[[Any, int, int | None, str], Batch]
    fixed: dict[str, Any] = field(default_factory=dict)
    seq_len: str | None = None

    @property
    def model_class(self) -> Any:
        return getattr(_transformers(), self.model)

    @property
    def config_class(self) -> Any:
        return getattr(_transformers(), self.config)


@dataclass(frozen=True)
class _Record:
    name: str
    kind: _Kind
    config: dict[str, Any]
    batch_size: int
    seq_len: int | None = None


def _find(name: str) -> _Record:
    for record in _TABLE:
        if record.name == name:
            return record
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names())}"
    raise UserError(f"the name of a zoo model is needed; got {name!r}; {hint}")


def _config(record: _Record, overrides: dict[str, Any], seq_len: int | None) -> Any:
    known = record.kind.config_class()
    unknown = [key for key in overrides if not hasattr(known, key)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], vars(known), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"see {record.kind.config} in transformers"
        raise UserError(f"fields of {record.kind.config} are needed; got {unknown[0]!r}; {hint}")
    settings = {**record.kind.fixed, **record.config, **overrides}
    limit = record.kind.seq_len
    if seq_len is not None and limit and limit not in overrides:
        # a model with fewer positions than the batch would index beyond its table
        settings[limit] = max(seq_len, settings.get(limit, getattr(known, limit, 0)))
    try:
        with _quiet():
            return record.kind.config_class(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"a valid {record.kind.config} is needed; {error}; check the settings") from None


def _construct(record: _Record, config: Any) -> nn.Module:
    try:
        model: nn.Module = record.kind.model_class(config)
    except (ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise UserError(
            f"a valid {record.kind.config} is needed; {error}; check the settings of {record.name}"
        ) from None
    return model


def _transformers() -> Any:
    return needed("transformers", "the zoo")


def _num_params(record: _Record) -> int:
    model, _ = build(record.name)
    return sum(parameter.numel() for parameter in model.parameters())


def _of_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def _tokens(vocab: int, size: tuple[int, ...], device: str) -> Tensor:
    if device == "meta":
        return torch.empty(size, dtype=torch.long, device=device)
    return torch.randint(0, vocab, size, device=device)


def _causal_batch(config: Any, batch_size: int, seq_len: int | None, device: str) -> Batch:
    ids = _tokens(config.vocab_size, (batch_size, seq_len or 1), device)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_batch(config: Any, batch_size: int, seq_len: int | None, device: str) -> Batch:
    size = (batch_size, seq_len or 1)
    return {"input_ids": _tokens(config.vocab_size, size, device), "labels": _tokens(config.vocab_size, size, device)}


def _image_batch(config: Any, batch_size: int, seq_len: int | None, device: str) -> Batch:
    del seq_len
    side = getattr(config, "image_size", None) or (64 if len(config.depths) < 3 else 224)
    pixels = torch.empty if device == "meta" else torch.randn
    return {
        "pixel_values": pixels(batch_size, config.num_channels, side, side, device=device),
        "labels": _tokens(config.num_labels, (batch_size,), device),
    }


CAUSAL = "causal language model"
_GPT2 = _Kind(CAUSAL, "GPT2LMHeadModel", "GPT2Config", _causal_batch, {"use_cache": False}, "n_positions")
_LLAMA = _Kind(
    CAUSAL, "LlamaForCausalLM", "LlamaConfig", _causal_batch, {"use_cache": False}, "max_position_embeddings"
)
_QWEN2 = _Kind(
    CAUSAL, "Qwen2ForCausalLM", "Qwen2Config", _causal_batch, {"use_cache": False}, "max_position_embeddings"
)


def _causal(name: str, config: str = "") -> _Kind:
    fixed = {"use_cache": False}
    return _Kind(
        CAUSAL, f"{name}ForCausalLM", config or f"{name}Config", _causal_batch, fixed, "max_position_embeddings"
    )


_QWEN3, _OLMO2, _GEMMA3 = _causal("Qwen3"), _causal("Olmo2"), _causal("Gemma3", "Gemma3TextConfig")
# a state of fixed size: sequences may be as long as any
_MAMBA2 = _Kind(
    "state-space language model", "Mamba2ForCausalLM", "Mamba2Config", _causal_batch, {"use_cache": False}, ""
)


def _mixture(name: str) -> _Kind:
    return _Kind(
        "mixture of experts",
        f"{name}ForCausalLM",
        f"{name}Config",
        _causal_batch,
        {"use_cache": False},
        "max_position_embeddings",
    )


_MIXTRAL, _QWEN3_MOE, _DEEPSEEK_V3, _GPT_OSS = map(_mixture, ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"))
_BERT = _Kind("masked language model", "BertForMaskedLM", "BertConfig", _masked_batch, {}, "max_position_embeddings")
_T5 = _Kind(
    "encoder-decoder",
    "T5ForConditionalGeneration",
    "T5Config",
    _masked_batch,
    {"use_cache": False, "decoder_start_token_id": 0},
    "n_positions",
)
_VIT = _Kind("image classifier", "ViTForImageClassification", "ViTConfig", _image_batch)
_RESNET = _Kind("image classifier", "ResNetForImageClassification", "ResNetConfig", _image_batch)

TINY_VOCAB = {"vocab_size": 331, "bos_token_id": 1, "eos_token_id": 2}
"""A vocabulary that no device count divides."""


def _widths(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _tiny_llama(**more: Any) -> dict[str, Any]:
    return {
        **TINY_VOCAB,
        **_widths(64, 176, 2, 4),
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **more,
    }


_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}

_TABLE: tuple[_Record, ...] = (
    _Record(
        "gpt2-tiny",
        _GPT2,
        {**TINY_VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64},
        4,
        32,
    ),
    _Record("gpt2", _GPT2, {}, 8, 1024),
    _Record("gpt2-medium", _GPT2, {"n_embd": 1024, "n_layer": 24, "n_head": 16}, 8, 1024),
    _Record("gpt2-large", _GPT2, {"n_embd": 1280, "n_layer": 36, "n_head": 20}, 8, 1024),
    _Record("gpt2-xl", _GPT2, {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 8, 1024),
    _Record("llama-tiny", _LLAMA, _tiny_llama(), 4, 32),
    _Record("llama-2-7b", _LLAMA, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, 8, 4096),
    _Record(
        "llama-3-8b",
        _LLAMA,
        {**_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336},
        8,
        4096,
    ),
    _Record(
        "llama-3-70b",
        _LLAMA,
        {
            **_LLAMA_3,
            **_widths(8192, 28672, 80, 64),
        },
        8,
        8192,
    ),
    _Record("qwen2-tiny", _QWEN2, _tiny_llama(tie_word_embeddings=True), 4, 32),
    _Record(
        "qwen2-7b",
        _QWEN2,
        {
            "vocab_size": 152064,
            **_widths(3584, 18944, 28, 28),
            "num_key_value_heads": 4,
        },
        8,
        4096,
    ),
    _Record("qwen3-tiny", _QWEN3, _tiny_llama(head_dim=16), 4, 32),
    _Record(
        "qwen3-8b",
        _QWEN3,
        {
            **_widths(4096, 12288, 36, 32),
            "vocab_size": 151936,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        8,
        4096,
    ),
    _Record("olmo-2-tiny", _OLMO2, _tiny_llama(), 4, 32),
    _Record(
        "olmo-2-7b",
        _OLMO2,
        {
            **_widths(4096, 11008, 32, 32),
            "vocab_size": 100352,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        8,
        4096,
    ),
    _Record(
        "gemma-3-tiny",
        _GEMMA3,
        _tiny_llama(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        4,
        32,
    ),
    _Record(
        "gemma-3-4b",
        _GEMMA3,
        {
            **_widths(2560, 10240, 34, 8),
            "vocab_size": 262208,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
        8,
        4096,
    ),
    _Record(
        "mamba-2-tiny",
        _MAMBA2,
        {
            **TINY_VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
        4,
        32,
    ),
    _Record(
        "mamba-2-2.7b",
        _MAMBA2,
        {
            "vocab_size": 50288,
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "num_heads": 80,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
        8,
        4096,
    ),
    _Record("mixtral-tiny", _MIXTRAL, _tiny_llama(num_local_experts=4, num_experts_per_tok=2), 4, 32),
    _Record("mixtral-8x7b", _MIXTRAL, {}, 8, 4096),
    _Record(
        "qwen3-moe-tiny",
        _QWEN3_MOE,
        _tiny_llama(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
        4,
        32,
    ),
    _Record(
        "qwen3-30b-a3b",
        _QWEN3_MOE,
        {
            **_widths(2048, 6144, 48, 32),
            "vocab_size": 151936,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        8,
        4096,
    ),
    _Record(
        "deepseek-v3-tiny",
        _DEEPSEEK_V3,
        _tiny_llama(
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        ),
        4,
        32,
    ),
    _Record("deepseek-v3", _DEEPSEEK_V3, {}, 8, 4096),
    _Record(
        "gpt-oss-tiny",
        _GPT_OSS,
        _tiny_llama(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=48,
            rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        ),
        4,
        32,
    ),
    _Record("gpt-oss-20b", _GPT_OSS, {"num_hidden_layers": 24, "num_local_experts": 32}, 8, 4096),
    _Record(
        "bert-tiny",
        _BERT,
        {
            "vocab_size": 331,
            **_widths(48, 96, 2, 3),
            "max_position_embeddings": 64,
        },
        4,
        32,
    ),
    _Record("bert-base", _BERT, {}, 16, 512),
    _Record(
        "bert-large",
        _BERT,
        {
            **_widths(1024, 4096, 24, 16),
        },
        16,
        512,
    ),
    _Record(
        "t5-tiny",
        _T5,
        {"vocab_size": 331, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 3},
        4,
        32,
    ),
    _Record("t5-base", _T5, {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}, 8, 512),
    _Record(
        "vit-tiny",
        _VIT,
        {
            "image_size": 32,
            "patch_size": 8,
            **_widths(48, 96, 2, 3),
            "num_labels": 11,
        },
        4,
    ),
    _Record("vit-b-16", _VIT, {"num_labels": 1000}, 64),
    _Record(
        "vit-l-16",
        _VIT,
        {
            **_widths(1024, 4096, 24, 16),
            "num_labels": 1000,
        },
        64,
    ),
    _Record(
        "resnet-tiny",
        _RESNET,
        {
            "embedding_size": 8,
            "hidden_sizes": [16, 32],
            "depths": [1, 2],
            "layer_type": "basic",
            "num_labels": 11,
        },
        4,
    ),
    _Record("resnet-50", _RESNET, {"num_labels": 1000}, 64),
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from commenting on token ids beyond a tiny vocabulary."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
