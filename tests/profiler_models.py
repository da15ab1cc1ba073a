"""Small models of many kinds, for the tests of the profiler: each a function that returns (model, batch, loss_fn)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Built = tuple[nn.Module, Any, Callable[[Any, Any], Tensor] | None]


def tokens(vocab: int = 331, batch: int = 4, length: int = 48) -> Tensor:
    return torch.randint(0, vocab, (batch, length))


def language_batch(**more: Any) -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **more}


def image_batch() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}


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


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_hidden_layers": 2}
    batch = {"input_ids": tokens(), "labels": tokens(), "attention_mask": torch.ones(4, 48, dtype=torch.long)}
    return BertForMaskedLM(BertConfig(vocab_size=331, **sizes)), batch, None


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes)
    return ViTForImageClassification(config), image_batch(), None


def resnet() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], num_labels=10)
    return ResNetForImageClassification(config), image_batch(), None


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 176, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=331, decoder_start_token_id=0, pad_token_id=0, **sizes))
    return model, {"input_ids": tokens(), "labels": tokens(length=31), "use_cache": False}, None


def mlp() -> Built:
    model = nn.Sequential(nn.Linear(40, 120), nn.GELU(), nn.Linear(120, 7))
    return model, (torch.randn(30, 40),), lambda out, batch: out.logsumexp(-1).mean()


class Net(nn.Module):
    """A convolutional classifier with batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1),
        )
        self.head = nn.Linear(48, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(image).relu().mean((2, 3))), label)


def cnn() -> Built:
    return Net(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))), None


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = kind(32, 48, 2, batch_first=True)
        self.head = nn.Linear(48, 100)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(ids))[0]).flatten(0, 1), ids.flatten())


def lstm() -> Built:
    return Recurrent(nn.LSTM), (tokens(100, 5, 20),), None


def gru() -> Built:
    return Recurrent(nn.GRU), (tokens(100, 5, 20),), None


class TiedAndFrozen(nn.Module):
    """A tied embedding, a frozen layer, an unused one, a stray tensor, and a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.unused = nn.Linear(32, 8)
        self.part = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 97, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.linspace(0.5, 1.5, 32)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.frozen(self.embed(ids)) * self.scale
        x = x + checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=False)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def tied() -> Built:
    return TiedAndFrozen(), (tokens(97, 6, 21),), None


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


EXACT = (gpt2, llama, llama_bf16, llama_padded, bert, vit, t5, mlp, gru, tied, length_dependent)
"""Models whose peak is made of tensors alone."""
APPROXIMATE = (llama_checkpointed, resnet, cnn, lstm)
"""Models in which kernels' own workspaces count, which are modelled."""
