"""Rows of transformers' documentation: BERT and Pythia by attention kernel, bert-large on a V100."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import NoUpdate, Program, ids
from .rows import TYPES_ALONE, Row

_LOOP = (
    "the script's loop binds `outputs` after each forward, so one step's logits live through the next one's forward "
    "(recalled); gradients set to None; loss = logits.sum(); no optimizer"
)


class LogitsSummed(nn.Module):
    """The script's loop: what the last step put out is let go when the next forward has returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.outputs: Any = None

    def forward(self, input_ids: Tensor) -> Tensor:
        presents: list[Any] = []
        for module in self.modules():
            if hasattr(module, "layer_idx"):
                module.presents = presents
        outputs = self.model(input_ids)
        self.outputs = outputs, presents
        return outputs.logits.sum()


def bert(row: Row) -> Program:
    from transformers import BertConfig, BertLMHeadModel

    kernel = row.id.rpartition("-")[2]
    with torch.device("meta"):
        model = BertLMHeadModel(BertConfig(attn_implementation=_scores() if kernel == "eager" else kernel))
        _mask(model, row)
    return _summed(row, model.half(), "a100", f"{_LOOP}; scores are masked though nothing is hidden (modeling_bert.py)")


def _scores() -> str:
    """Return the name of BERT's attention by scores as transformers had it until 2024, which always added a mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("bert_masked", masked_scores)
    return "bert_masked"


def _mask(model: nn.Module, row: Row) -> None:
    """Give each layer the mask, of the parameters' type: with fp16 autocast it makes the scores fp32."""
    for module in model.modules():
        if hasattr(module, "attention_head_size"):
            zeros = torch.zeros(row.data["micro_batch_per_gpu"], 1, 1, row.data["seq_len"])
            module.register_buffer("hidden", zeros, persistent=False)
            module.is_early = row.date < TYPES_ALONE


def masked_scores(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    scores = torch.matmul(query, key.transpose(-1, -2)) / query.shape[-1] ** 0.5 + module.hidden
    weights = EarlySoftmax.apply(scores) if module.is_early else F.softmax(scores, dim=-1)
    return torch.matmul(F.dropout(weights, dropout), value).transpose(1, 2).contiguous(), None


class EarlySoftmax(torch.autograd.Function):
    """Softmax before torch 1.11, whose backward asked for the input, of which it read the type alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(scores, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        scores, weights = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, weights, -1, scores.dtype)


def pythia(row: Row) -> Program:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernel = row.id.rpartition("-")[2]
    ALL_ATTENTION_FUNCTIONS.register("neox_eager", neox_scores)
    ALL_ATTENTION_FUNCTIONS.register("neox_sdpa", neox_sdpa)
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        rotary_pct=0.25, use_parallel_residual=True, attn_implementation=f"neox_{kernel}", use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config).half()
        for layer in model.gpt_neox.layers:
            layer.attention.register_buffer("is_seen", torch.ones(2048, 2048, dtype=torch.bool), persistent=False)
            layer.attention.register_buffer("tables", torch.zeros(2, 2048, 16), persistent=False)
    read = (
        "found by looking for what was missing, then recalled of the source: "
        "transformers of the time rotates q and k with tables in fp32, so that both and the scores are fp32 (recalled); "
        "use_cache is on, so that the outputs hold k and v of every layer; each layer has a "
        "causal mask and tables of its own"
    )
    return _summed(row, model, "rtx3080ti-laptop", f"{_LOOP}; {read}")


def neox_scores(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Attention as GPT-NeoX of transformers 4.41 spells it: fp32 scores, added to zeros, masked, softmax, then 16 bits."""
    batch, heads, length, head_dim = query.shape
    query, key = query.float(), key.float()
    module.presents.append((key, value))
    query, key = query.view(-1, length, head_dim), key.view(-1, length, head_dim)
    scores = torch.zeros(batch * heads, length, length, dtype=query.dtype, device=query.device)
    scores = torch.baddbmm(scores, query, key.transpose(1, 2), alpha=head_dim**-0.5)
    scores = scores.view(batch, heads, length, length)
    scores = torch.where(module.is_seen[:length, :length], scores, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


def neox_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """The same with SDPA: q and k rotated in fp32 and brought back."""
    query, key = query.float(), key.float()
    module.presents.append((key, value))
    query, key = query.to(value.dtype), key.to(value.dtype)
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found.transpose(1, 2).contiguous(), None


def bert_large(row: Row) -> Program:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation=_scores(),
    )  # fmt: skip
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
        _mask(model, row)
    if row.id.endswith("-gc"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    micro = row.data["micro_batch_per_gpu"]
    batch = {
        "input_ids": ids(micro, row.data["seq_len"]),
        "labels": torch.zeros(micro, dtype=torch.long, device="meta"),
    }
    options: dict[str, Any] = {"accumulate": row.data["accumulation"], "keep_grads": True}
    if "amp" in row.id:
        options["autocast"] = "fp16"
    return Program(
        model, batch, "v100-16gb",
        "Trainer of 2022: checkpointing is reentrant, gradients are zeroed (recalled); scores are masked (modeling_bert.py); "
        "torch's softmax of the time kept its input (found by looking for missing bytes, then recalled of derivatives.yaml, and "
        "read in transformers' pytorch_utils.py)",
        make_optimizer=_optimizer(row),
        options=options,
    )  # fmt: skip


def _optimizer(row: Row) -> Any:
    if "adafactor" in row.id:
        from transformers import Adafactor

        return lambda params: Adafactor(params, lr=1e-3, scale_parameter=False, relative_step=False)
    if "adam8bit" in row.id:
        from trainwright.arguments import as_maker

        return as_maker("adamw8bit", "gpu")[0]  # on a GPU the one kernel a parameter that bitsandbytes has
    return lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False, fused=False)


def _summed(row: Row, model: nn.Module, hardware: str, read: str) -> Program:
    batch = (ids(row.data["micro_batch_per_gpu"], row.data["seq_len"]),)
    return Program(LogitsSummed(model), batch, hardware, read, make_optimizer=NoUpdate)
