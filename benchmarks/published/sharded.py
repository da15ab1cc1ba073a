"""Rows of torchtitan, LLM Foundry and fsdp_qlora: the model wrapped as the source wraps it, one process of several.

Each builder returns a function that makes and wraps the model; `profile` calls it among imagined processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from .program import CannotExpress, Program, ids
from .rows import LOGITS_LET_GO, NEW_KERNELS, Row

_GPUS = {
    "H100-95GiB": "h100-96gb", "H100-SXM5-80GB": "h100", "A100-80GB": "a100", "A100-40GB": "a100-40gb",
    "RTX3090-24GB": "rtx3090", "RTX4090": "rtx4090", "A100-SXM4-40GB": "a100-40gb",
}  # fmt: skip
_LOSS_CHUNKS = 8
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


class Attention(nn.Module):
    """torchtitan's: q, k and v apart, rotation by complex numbers in fp32, shared heads repeated before SDPA."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.asks_for_cudnn = False
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (project(x).view(batch, length, -1, self.head_dim) for project in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        repeats = self.heads // self.kv_heads
        if repeats > 1:
            k, v = _repeated(k, repeats), _repeated(v, repeats)
        parts = (part.transpose(1, 2) for part in (q, k, v))
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True) if self.asks_for_cudnn else nullcontext():
            found = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None)
        return self.wo(found.transpose(1, 2).contiguous().view(batch, length, -1))


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def _repeated(x: Tensor, repeats: int) -> Tensor:
    batch, length, heads, head_dim = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, repeats, head_dim).reshape(batch, length, -1, head_dim)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, data: dict[str, Any], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(data["hidden"], data["heads"], data["kv_heads"])
        self.feed_forward = FeedForward(data["hidden"], data["ffn"])
        self.attention_norm, self.ffn_norm = norm(data["hidden"]), norm(data["hidden"])

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns, mask=mask)
        return x + self.feed_forward(self.ffn_norm(x))


class WideNorm(nn.Module):
    """torchtitan's RMS norm of 2024: from elementwise ops, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        return (values * torch.rsqrt((values * values).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Titan(nn.Module):
    """torchtitan's decoder."""

    def __init__(self, data: dict[str, Any], length: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(data["vocab"], data["hidden"])
        head_dim = data["hidden"] // data["heads"]
        self.register_buffer("turns", torch.zeros(length, head_dim // 2, dtype=torch.complex64), persistent=False)
        self.layers = nn.ModuleDict({str(i): Block(data, norm) for i in range(data["layers"])})
        self.norm = norm(data["hidden"])
        self.output = nn.Linear(data["hidden"], data["vocab"], bias=False)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.before_output(tokens, mask))

    def before_output(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.turns) if mask is None else layer(x, self.turns, mask)
        return self.norm(x)


class Trained(nn.Module):
    """The loop since 2024-06: the logits are let go before the backward, the loss is in fp32, in chunks of positions."""

    def __init__(self, model: nn.Module, num_chunks: int = 1) -> None:
        super().__init__()
        self.model, self.num_chunks = model, num_chunks

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens)
        if self.num_chunks == 1:
            return _fp32_loss(logits, (tokens, targets))
        parts = zip(logits.chunk(self.num_chunks, dim=1), targets.chunk(self.num_chunks, dim=1))
        losses = [_fp32_loss(part, (tokens, target)) for part, target in parts]
        return sum(losses[1:], losses[0]) / self.num_chunks


class WideLogits(nn.Module):
    """The loop before: the model's logits are fp32 and bound until the update."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).float()


def titan(row: Row) -> Program:
    data, num_layers, date = row.data["model"], row.data["model"]["layers"], row.data["source"]["date"]
    is_2d = row.data["parallelism"]["kind"] == "2d"
    shards, ways = _mesh_of(row)
    recent = date >= LOGITS_LET_GO

    def make() -> nn.Module:
        model = Titan(data, row.data["seq_len"], nn.RMSNorm if date >= NEW_KERNELS else WideNorm)
        for layer in model.layers.values():
            layer.attention.asks_for_cudnn = date >= NEW_KERNELS
        meshes = _meshes(shards, ways)
        if is_2d:
            _split_tensors(model, meshes["tp"])
        _checkpoint(model, row.data["activation_checkpointing"])
        if row.data["compile"].startswith("compile"):
            _compile_blocks(model)
        _shard(model, meshes["dp"], row.data["parallelism"]["detail"], num_layers)
        return Trained(model, _LOSS_CHUNKS if row.asked["loss"] else 1) if recent else WideLogits(model)

    tokens = ids(row.data["micro_batch_per_gpu"], row.data["seq_len"])
    read = (
        "torchtitan's parallelize_llama.py: bf16 gather, fp32 reduction, the last block kept gathered; the root too, found by "
        "looking for what was missing, then recalled of torch at the time; "
        "policies of selective checkpointing; each block compiled by itself; norms from ops in fp32 until torch had a kernel "
        "(norms.py, pytorch#153666), cuDNN's attention from about then on (attention.py); before 2024-06 fp32 logits bound "
        "through the backward; since, "
        "logits let go before the backward, loss in fp32 (dates recalled), in 8 chunks where the row says so (loss.py)"
    )
    return Program(
        make, (tokens, tokens), _hardware(row), read, None if recent else _fp32_loss,
        _fused_adamw if row.data["optimizer"].endswith("fused") else _foreach_adamw,
        {
            "processes": row.num_gpus, "expandable_segments": "expandable" in str(row.data["memory"]), "clip_norm": row.clip_norm,
        },
        loss_parallel if is_2d else nullcontext,
    )  # fmt: skip


def _compile_blocks(model: Titan) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = torch.compile(layer, fullgraph=True)


def _mesh_of(row: Row) -> tuple[int, int]:
    """Data-parallel shards and tensor-parallel ways: `fsdp 4 × tp 2`."""
    words = row.data["parallelism"]["mesh"].replace("×", " ").split()
    sizes = {words[place]: int(words[place + 1]) for place in range(len(words) - 1) if words[place + 1].isdigit()}
    return sizes.get("fsdp", 1), sizes.get("tp", 1)


def _meshes(shards: int, ways: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (shards, ways), mesh_dim_names=("dp", "tp"))


def _shard(model: Titan, mesh: Any, detail: str | None, num_layers: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    detail = detail or ""
    never = detail.startswith("no reshard")
    for name, layer in model.layers.items():
        again = not never and ("everywhere" in detail or int(name) < num_layers - 1)
        fully_shard(layer, **how, reshard_after_forward=again)
    fully_shard(model, **how, reshard_after_forward="everywhere" in detail)


def _split_tensors(model: Titan, mesh: Any) -> None:
    """Sequence and tensor parallelism, the loss on logits split over the vocabulary's ranks gathered first."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parallelize_module(
        model, mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )  # fmt: skip
    for layer in model.layers.values():
        layer.attention.heads //= mesh.size()
        layer.attention.kv_heads //= mesh.size()
        parallelize_module(
            layer, mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )  # fmt: skip


def _checkpoint(model: Titan, how: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for place, (name, layer) in enumerate(model.layers.items(), 1):
        if how.startswith("full") or (how.startswith("selective, every 2nd layer") and place % 2 == 0):
            model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)
        elif "op level" in how or how.startswith("default"):
            model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False, context_fn=every_second_product)


def every_second_product() -> Any:
    """The contexts of torchtitan's policy: attention and every other product is kept, the rest computed again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = {
        aten.mm.default, aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }  # fmt: skip
    counts: dict[bool, int] = defaultdict(int)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is aten.mm.default:
            counts[context.is_recompute] += 1
        is_kept = func in kept and not (func is aten.mm.default and counts[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _fp32_loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1).float(), batch[-1].flatten(0, 1))


def _foreach_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, foreach=True)


def _hardware(row: Row) -> str:
    name, count = _GPUS[row.data["gpu"]["type"]], row.num_gpus
    return f"{count // 8}x8x{name}" if count > 8 else f"{count}x{name}"


class MptBlock(nn.Module):
    """LLM Foundry's: norms in 16 bits, one projection for q, k and v, exact GELU, biases."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__()
        width, self.heads = data["hidden"], data["heads"]
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, data["ffn"]), nn.Linear(data["ffn"], width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT with learned positions and the head tied to the embedding."""

    def __init__(self, data: dict[str, Any], length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(data["vocab"], data["hidden"]), nn.Embedding(length, data["hidden"])
        self.layers = nn.ModuleDict({str(i): MptBlock(data) for i in range(data["layers"])})
        self.norm_f = nn.LayerNorm(data["hidden"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return F.linear(self.norm_f(x), self.wte.weight)


def foundry(row: Row) -> Program:
    data = row.data["model"]

    def make() -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = torch.bfloat16 if row.data["dtype_scheme"].startswith("bf16") else torch.float32
        model = Mpt(data, row.data["seq_len"]).to(dtype)
        _checkpoint(model, row.data["activation_checkpointing"])
        how = {
            "mesh": _meshes(row.num_gpus, 1)["dp"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        }
        for layer in model.layers.values():
            fully_shard(layer, **how)
        fully_shard(model, **how)
        return model

    tokens = ids(row.data["micro_batch_per_gpu"], row.data["seq_len"])
    read = "FSDP1 stands as fully_shard, bf16 gather and reduction; attention is SDPA's flash kernel in place of flash-attn"
    options = {"processes": row.num_gpus, "accumulate": row.data["accumulation"], "clip_norm": row.clip_norm}
    return Program(make, (tokens, tokens), _hardware(row), read, _fp32_loss, _foreach_adamw, options)


class Packed(nn.Module):
    """torchtune's step on packed samples: a mask of blocks, logits let go before the backward.

    They are fp32 and whole, or in chunks of positions that the loss brings to fp32 one by one (ce_chunked_output_loss.py).
    """

    def __init__(self, model: Titan, num_chunks: int = 0, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.num_chunks = model, num_chunks
        loss = _summed_loss if num_chunks else F.cross_entropy
        self.loss = torch.compile(loss) if compiled else loss

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        if not self.num_chunks:
            logits = self.model(tokens, mask).float()
            return self.loss(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        parts = [
            self.model.output(part)
            for part in self.model.before_output(tokens, mask).tensor_split(self.num_chunks, dim=1)
        ]
        logits = [part.reshape(-1, part.shape[-1]) for part in parts]
        labels = [part.reshape(-1) for part in targets.tensor_split(self.num_chunks, dim=1)]
        del parts
        losses = [self.loss(part, label) for part, label in zip(logits, labels)]
        return sum(losses[1:], losses[0]) / targets.numel()


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def torchtune(row: Row) -> Program:
    data, length, micro = row.data["model"], row.data["seq_len"], row.data["micro_batch_per_gpu"]
    if length is None:
        raise CannotExpress("samples of the length that the data has, which the source does not state")
    if "LoRA" in row.data["optimizer"]:
        raise CannotExpress(
            "activations offloaded by hooks of the source's own, and a rank of LoRA that it does not state"
        )
    is_compiled = row.data["compile"].startswith("compile")
    num_chunks = _LOSS_CHUNKS if row.asked["loss"] else 0

    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = Titan(data, length, WideNorm)
                model.output.weight = model.tok_embeddings.weight
        finally:
            torch.set_default_dtype(before)
        if is_compiled:
            _compile_blocks(model)
        _checkpoint(model, row.data["activation_checkpointing"])
        return Packed(model, num_chunks, is_compiled)

    tokens = ids(micro, length)
    mask = torch.zeros(micro, 1, length, length, dtype=torch.bool, device="meta")
    read = (
        "norms in fp32 by hand, rotation in fp32, fp32 logits let go, or in 8 chunks (ce_chunked_output_loss.py); the mask as a "
        "boolean tensor for SDPA (recalled); each block compiled by itself, and the loss (training/_compile.py)"
    )
    return Program(make if is_compiled else make(), (tokens, mask, tokens), "a100", read, None, _fused_adamw)


def _fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-5, fused=True)
