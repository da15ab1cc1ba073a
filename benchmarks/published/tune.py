"""Rows of torchtune: Llama as its modules write it, on packed samples, whole or with LoRA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .adapters import LoraLinear, without_training
from .program import CannotExpress, Program, ids
from .rows import Row
from .sharded import LOSS_CHUNKS, Titan, WideNorm, checkpoint, compile_blocks, fused_adamw

_KEYS_READ = 256
"""Keys that flex attention reads for a query: samples of alpaca have some 200 tokens, and a mask's blocks are 128 by 128, of which
the two are not skipped that hold a query's sample."""
_STASHED = 5
"""Tensors on their way to the host that OffloadActivations keeps."""


@torch.compiler.disable
def in_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flex attention under a mask of packed samples (attention_utils.py), by its work: within runs of `_KEYS_READ` tokens."""
    parts = (part.unflatten(2, (-1, _KEYS_READ)).transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    found = F.scaled_dot_product_attention(*parts)
    return found.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)


class Packed(nn.Module):
    """torchtune's step on packed samples: a mask of blocks, logits let go before the backward.

    They are fp32 and whole, or in chunks of positions that the loss brings to fp32 one by one (ce_chunked_output_loss.py).
    """

    def __init__(self, model: Titan, num_chunks: int = 0, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.num_chunks = model, num_chunks
        loss = _summed_loss if num_chunks else F.cross_entropy
        self.loss = torch.compile(loss) if compiled else loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if not self.num_chunks:
            logits = self.model(tokens).float()
            return self.loss(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        parts = [
            self.model.output(part) for part in self.model.before_output(tokens).tensor_split(self.num_chunks, dim=1)
        ]
        logits = [part.reshape(-1, part.shape[-1]) for part in parts]
        labels = [part.reshape(-1) for part in targets.tensor_split(self.num_chunks, dim=1)]
        del parts
        losses = [self.loss(part, label) for part, label in zip(logits, labels)]
        return sum(losses[1:], losses[0]) / targets.numel()


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


class Offloaded(nn.Module):
    """Activations that blocks keep wait on the host (training/_activation_offloading.py); the last few and parameters stay."""

    def __init__(self, block: nn.Module, stash: list[Tensor]) -> None:
        super().__init__()
        self.block, self.stash = block, stash

    def forward(self, *args: Any) -> Any:
        with saved_tensors_hooks(self._away, self._back):
            return self.block(*args)

    def _away(self, tensor: Tensor) -> Any:
        if isinstance(tensor, (nn.Parameter, nn.Buffer)) or tensor.nbytes < 1024:
            return tensor
        self.stash.append(tensor)
        del self.stash[:-_STASHED]
        return tensor.shape, tensor.stride(), tensor.dtype

    def _back(self, packed: Any) -> Tensor:
        self.stash.clear()
        if isinstance(packed, Tensor):
            return packed
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype)


_LORA_RANK = 64
"""recipes/configs/llama3_2/3B_lora_single_device.yaml: on q, v, the output projection and the feed-forward's three."""


def _adapt(model: Titan) -> None:
    without_training(model)
    for layer in model.layers.values():
        for part, names in ((layer.attention, ("wq", "wv", "wo")), (layer.feed_forward, ("w1", "w2", "w3"))):
            for name in names:
                setattr(part, name, LoraLinear(getattr(part, name), _LORA_RANK))


def torchtune(row: Row) -> Program:
    data, length, micro = row.data["model"], row.data["seq_len"], row.data["micro_batch_per_gpu"]
    if length is None:
        raise CannotExpress("samples of the length that the data has, which the source does not state")
    is_compiled, has_lora = row.data["compile"].startswith("compile"), "LoRA" in row.data["optimizer"]
    num_chunks = LOSS_CHUNKS if row.asked["loss"] else 0

    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = Titan(data, length, WideNorm)
                model.output.weight = model.tok_embeddings.weight
                if has_lora:
                    _adapt(model)
        finally:
            torch.set_default_dtype(before)
        for layer in model.layers.values():
            layer.attention.attend = in_documents
        if is_compiled:
            compile_blocks(model, fullgraph=False)
        checkpoint(model, row.data["activation_checkpointing"])
        if "offloading" in str(row.data["notes"]):
            stash: list[Tensor] = []
            for name, layer in model.layers.items():
                model.layers[name] = Offloaded(layer, stash)
        return Packed(model, num_chunks, is_compiled)

    tokens = ids(micro, length)
    read = (
        "norms in fp32 by hand, rotation in fp32, fp32 logits let go (recalled), or in 8 chunks (ce_chunked_output_loss.py); "
        "packed samples run through flex attention with a mask of blocks (attention_utils.py), compiled apart from the block; "
        "lengths of samples are not stated: some 200 tokens, alpaca's, are taken; each block compiled by itself, and the loss "
        "(training/_compile.py)"
    )
    return Program(
        make if is_compiled else make(), (tokens, tokens), "a100", read, None, fused_adamw, around=row.as_compiled_then
    )
