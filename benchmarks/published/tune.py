"""Rows of torchtune: Llama as its modules write it, on packed samples, whole or with LoRA."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .adapters import LoraLinear, without_training
from .program import CannotExpress, NoUpdate, Program, ids
from .rows import Row
from .sharded import LOSS_CHUNKS, Titan, WideNorm, checkpoint, compile_blocks, fused_adamw

_KEYS_READ = 256
"""Keys that flex attention reads for a query: samples of alpaca have some 200 tokens, and a mask's blocks are 128 by 128, of which
the two are not skipped that hold a query's sample."""
_STASHED = 5
"""Tensors last saved of which OffloadActivations keeps those that are on their way to the host (max_fwd_stash_size)."""
_TABLE_LENGTH = 131_072
"""Positions that Llama 3.2's table of rotations is built for (llama3_2/_model_builders.py)."""


@torch.compiler.disable
def in_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flex attention under a mask of packed samples (attention_utils.py), by its work: within runs of `_KEYS_READ` tokens."""
    parts = (part.unflatten(2, (-1, _KEYS_READ)).transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    found = F.scaled_dot_product_attention(*parts)
    return found.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)


_Turns = tuple[Tensor, Tensor]


def rotated_by_rows(x: Tensor, turns: _Turns) -> Tensor:
    """Rotate pairs of neighbours in fp32 by the table's rows at each token's place in its sample (position_embeddings.py)."""
    table, places = turns
    cos, sin = table[places].view(-1, x.shape[1], 1, x.shape[3] // 2, 2).unbind(-1)
    first, second = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(3).type_as(x)


class Tune(Titan):
    """torchtune's decoder: torchtitan's, with a table of rotations for the longest context, whatever the run's."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data, 1, WideNorm)
        table = torch.zeros(_TABLE_LENGTH, data["hidden"] // data["heads"] // 2, 2, dtype=torch.float32)
        self.register_buffer("turns", table, persistent=False)
        for layer in self.layers.values():
            layer.attention.attend, layer.attention.turn = in_documents, rotated_by_rows

    def hidden(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, (self.turns, places))
        return self.norm(x)


class Packed(nn.Module):
    """torchtune's step on packed samples: a mask of blocks, logits let go before the backward.

    They are fp32 and whole, or in chunks of positions that the loss brings to fp32 one by one (ce_chunked_output_loss.py).
    What blocks and the last norm keep may wait on the host; what the output keeps does not.
    """

    def __init__(self, model: Tune, num_chunks: int = 0, compiles_loss: bool = False, offloads: bool = False) -> None:
        super().__init__()
        self.model, self.num_chunks = model, num_chunks
        loss = _summed_loss if num_chunks else F.cross_entropy
        self.loss = torch.compile(loss) if compiles_loss else loss
        self.keeping = Offloaded() if offloads else nullcontext()

    def forward(self, tokens: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        with self.keeping:
            hidden = self.model.hidden(tokens, places)
        if not self.num_chunks:
            logits = self.model.output(hidden).float()
            return self.loss(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        parts = [self.model.output(part) for part in hidden.tensor_split(self.num_chunks, dim=1)]
        del hidden
        logits = [part.reshape(-1, part.shape[-1]) for part in parts]
        labels = [part.reshape(-1) for part in targets.tensor_split(self.num_chunks, dim=1)]
        del parts
        losses = [self.loss(part, label) for part, label in zip(logits, labels)]
        return sum(losses[1:], losses[0]) / targets.numel()


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


class Offloaded(saved_tensors_hooks):
    """Saved activations wait on the host (training/_activation_offloading.py); of the last few saved, the big ones stay.

    All that is saved is counted, parameters and small tensors too, of which none goes away.
    """

    def __init__(self) -> None:
        self.count, self.stash = 0, dict[int, Tensor]()
        super().__init__(self._away, self._back)

    def _away(self, tensor: Tensor) -> Any:
        self.count += 1
        if isinstance(tensor, (nn.Parameter, nn.Buffer)) or tensor.nbytes < 1024:
            return tensor
        self.stash = {number: kept for number, kept in self.stash.items() if number > self.count - _STASHED}
        self.stash[self.count] = tensor
        return self.count, tensor.shape, tensor.stride(), tensor.dtype

    def _back(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, shape, stride, dtype = packed
        if number in self.stash:
            return self.stash[number]
        self.stash.clear()
        return torch.empty_strided(shape, stride, dtype=dtype)


_LORA_RANK = 64
"""recipes/configs/llama3_2/3B_lora_single_device.yaml: on q, v, the output projection and the feed-forward's three."""


def _adapt(model: Titan) -> None:
    without_training(model)
    for layer in model.layers.values():
        for part, names in ((layer.attention, ("wq", "wv", "wo")), (layer.feed_forward, ("w1", "w2", "w3"))):
            for name in names:
                setattr(part, name, LoraLinear(getattr(part, name), _LORA_RANK))


class LowMemory(Titan):
    """torchtune's step of 2024-05, updated in the backward: fp32 logits, a shifted copy of them bound until it ends."""

    def __init__(self, data: dict[str, Any], length: int) -> None:
        super().__init__(data, length, WideNorm)
        table = torch.zeros(length, data["hidden"] // data["heads"] // 2, 2, dtype=torch.float32)
        self.register_buffer("turns", table, persistent=False)
        for layer in self.layers.values():
            layer.attention.turn = rotated_by_length
        self.logits: Tensor | None = None
        self.is_hooked = False

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            for param in self.parameters():
                param.register_post_accumulate_grad_hook(_update)
        self.logits = self.output(self.before_output(tokens)).float()[..., :-1, :].contiguous().transpose(1, 2)
        return F.cross_entropy(self.logits, labels[..., 1:].contiguous())


def rotated_by_length(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table[: x.shape[1]].view(1, x.shape[1], 1, x.shape[3] // 2, 2).unbind(-1)
    first, second = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(3).type_as(x)


def _update(param: Tensor) -> None:
    """Update in place by states in paged memory, which torch does not count, and drop the gradient."""
    param.grad = None


def low_memory(row: Row) -> Program:
    data, length = row.data["model"], row.data["seq_len"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = LowMemory(data, length)
    finally:
        torch.set_default_dtype(before)
    checkpoint(model, row.data["activation_checkpointing"])
    tokens = ids(row.data["micro_batch_per_gpu"], length)
    read = (
        "7B_full_low_memory.yaml and full_finetune_single_device.py of 2024-05 (recalled): bf16, every layer checkpointed, the "
        "update in the backward by bitsandbytes' PagedAdamW, whose states are in managed memory that torch does not count; fp32 "
        "logits, of which a shifted copy stays bound through the backward"
    )
    return Program(model, (tokens, tokens), "a100", read, None, NoUpdate)


def torchtune(row: Row) -> Program:
    if row.id.startswith("torchtune-l2"):
        return low_memory(row)
    data, length, micro = row.data["model"], row.data["seq_len"], row.data["micro_batch_per_gpu"]
    if length is None:
        raise CannotExpress("samples of the length that the data has, which the source does not state")
    is_compiled, has_lora = row.data["compile"].startswith("compile"), "LoRA" in row.data["optimizer"]
    num_chunks = LOSS_CHUNKS if row.asked["loss"] else 0
    compiles_loss = is_compiled and (
        num_chunks > 0 or has_lora
    )  # full_finetune_single_device.py drops a whole loss compiled

    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = Tune(data)
                model.output.weight = model.tok_embeddings.weight
                if has_lora:
                    _adapt(model)
        finally:
            torch.set_default_dtype(before)
        if is_compiled:
            compile_blocks(model, fullgraph=False)
        checkpoint(model, row.data["activation_checkpointing"])
        return Packed(model, num_chunks, compiles_loss, "offloading" in str(row.data["notes"]))

    tokens = ids(micro, length)
    read = (
        "norms in fp32 by hand, rotation in fp32 by rows of a table of 131,072 positions (position_embeddings.py, "
        "llama3_2/_model_builders.py), fp32 logits let go, or in 8 chunks (ce_chunked_output_loss.py); packed samples run through "
        "flex attention with a mask of blocks (attention_utils.py), compiled apart from the block; lengths of samples are not "
        "stated: some 200 tokens, alpaca's, are taken; each block compiled by itself, and the loss where it is in chunks: "
        "full_finetune_single_device.py calls compile_loss and drops what it returns, which leaves a whole loss eager "
        "(training/_compile.py); what the model keeps, but for its output, waits on the host where the row says so"
    )
    batch = (tokens, tokens, tokens)
    return Program(make if is_compiled else make(), batch, "a100", read, None, fused_adamw, around=row.as_compiled_then)
