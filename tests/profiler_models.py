"""A few small models for the tests of the profiler: each a function that returns (model, batch, loss_fn).

Those of `benchmarks.profiler.architectures` are many more. And what tests skip where a processor lacks it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.profiler.plain import Built, TiedAndFrozen, gru, lstm, mlp
from benchmarks.profiler.plain import conv_net as cnn
from benchmarks.profiler.plain import tied_and_frozen as tied

__all__ = ["Built", "LengthDependent", "TiedAndFrozen", "cnn", "gpt2", "gru", "length_dependent", "llama", "llama_bf16"]
__all__ += ["llama_checkpointed", "llama_padded", "lstm", "mlp", "skip_without_bf16_lstm", "t5", "tied", "tokens"]


def skip_without_bf16_lstm() -> None:
    """Skip a test that runs an LSTM in bf16 where the processor cannot."""
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("oneDNN runs an LSTM in bf16 with AVX512 alone")


def tokens(vocab: int = 331, batch: int = 4, length: int = 48) -> Tensor:
    return torch.randint(0, vocab, (batch, length))


def language_batch(**more: Any) -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **more}


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=331, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config), language_batch(), None


def llama(**changes: Any) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**{"num_hidden_layers": 2, "vocab_size": 331, **sizes, **changes})
    return LlamaForCausalLM(config), language_batch(), None


def llama_bf16() -> Built:
    model, batch, loss_fn = llama()
    return model.to(torch.bfloat16), batch, loss_fn


def llama_padded() -> Built:
    model, batch, loss_fn = llama()
    mask = torch.ones(4, 48, dtype=torch.long)
    mask[0, :20] = 0
    return model, {**batch, "attention_mask": mask}, loss_fn


def llama_checkpointed() -> Built:
    model, batch, loss_fn = llama()
    model.gradient_checkpointing_enable()
    return model, batch, loss_fn


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 176, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=331, decoder_start_token_id=0, pad_token_id=0, **sizes))
    return model, {"input_ids": tokens(), "labels": tokens(length=31), "use_cache": False}, None


class LengthDependent(nn.Module):
    """Runs as many layers as the batch's integers say, on the rows that a mask of integers selects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, depths: Tensor) -> Tensor:
        for _ in range(int(depths.max().item())):
            x = torch.tanh(self.layer(x))
        return x[depths > 1].square().mean()


def length_dependent() -> Built:
    return LengthDependent(), (torch.randn(16, 32), torch.randint(1, 5, (16,))), None
