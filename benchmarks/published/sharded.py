"""Rows of torchtitan: the model wrapped as the source wraps it, one process of several.

Each builder returns a function that makes and wraps the model; `profile` calls it among imagined processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from .program import Program, ids
from .rows import ENDS_APART, FUSED, LOGITS_LET_GO, NEW_KERNELS, Row

_GPUS = {
    "H100-95GiB": "h100-96gb", "H100-SXM5-80GB": "h100", "A100-80GB": "a100", "A100-40GB": "a100-40gb",
    "RTX3090-24GB": "rtx3090", "RTX4090": "rtx4090", "A100-SXM4-40GB": "a100-40gb",
}  # fmt: skip
LOSS_CHUNKS = 8
_MAX_NORM = 1.0
"""To which torchtitan's loop clips, whether a row names it or not."""
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


class Attention(nn.Module):
    """torchtitan's: q, k and v apart, rotation by complex numbers in fp32, shared heads repeated before SDPA."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.asks_for_cudnn = False
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal
        self.turn: Callable[[Tensor, Any], Tensor] = rotated
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: Any) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (project(x).view(batch, length, -1, self.head_dim) for project in (self.wq, self.wk, self.wv))
        q, k = self.turn(q, turns), self.turn(k, turns)
        repeats = self.heads // self.kv_heads
        if repeats > 1:
            k, v = _repeated(k, repeats), _repeated(v, repeats)
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True) if self.asks_for_cudnn else nullcontext():
            found = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(found.transpose(1, 2).contiguous().view(batch, length, -1))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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

    def forward(self, x: Tensor, turns: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
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

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.before_output(tokens))

    def before_output(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return self.norm(x)


class Trained(nn.Module):
    """The loop since torchtitan#391: logits are let go before the backward, the loss is in fp32, in chunks of positions."""

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
    data, date = row.data["model"], row.date
    is_2d = row.data["parallelism"]["kind"] == "2d"
    shards, ways = _mesh_of(row)
    recent = date >= LOGITS_LET_GO

    def make() -> nn.Module:
        model = Titan(data, row.data["seq_len"], nn.RMSNorm if date >= NEW_KERNELS else WideNorm)
        for layer in model.layers.values():
            layer.attention.asks_for_cudnn = date >= NEW_KERNELS
        mesh = meshes(shards, ways)
        if is_2d:
            _split_tensors(model, mesh["tp"])
        checkpoint(model, row.data["activation_checkpointing"])
        if row.data["compile"].startswith("compile"):
            compile_blocks(model)
        _shard(model, mesh["dp"], row.data["parallelism"]["detail"] or "", ends_apart=date >= ENDS_APART)
        return Trained(model, LOSS_CHUNKS if row.asked["loss"] else 1) if recent else WideLogits(model)

    tokens = ids(row.data["micro_batch_per_gpu"], row.data["seq_len"])
    read = (
        "torchtitan's parallelize_llama.py: bf16 gather, fp32 reduction, the last block kept gathered; the root too, found by "
        "looking for what was missing, then recalled of torch at the time; since torchtitan#1094 embedding and output by "
        "themselves, of which the output alone stays gathered; "
        "policies of selective checkpointing; each block compiled by itself; norms from ops in fp32 until torch had a kernel "
        "(norms.py, pytorch#153666), cuDNN's attention from about then on (attention.py); before torchtitan#391 fp32 "
        "logits bound through the backward; since, logits let go before it, loss in fp32, in 8 chunks where the row says so "
        "(loss.py); AdamW fused since torchtitan#881; gradients clipped to 1 (train.py)"
    )
    return Program(
        make, (tokens, tokens), hardware_of(row), read, None if recent else _fp32_loss,
        fused_adamw if _is_fused(row) else foreach_adamw,
        {
            "processes": row.num_gpus, "expandable_segments": "expandable" in str(row.data["memory"]), "clip_norm": _MAX_NORM,
        },
        lambda: _around(row, is_2d),
    )  # fmt: skip


def _is_fused(row: Row) -> bool:
    """Tell whether AdamW is one kernel; a row that leaves it to the version has what its date's torchtitan takes."""
    optimizer = row.data["optimizer"]
    return row.date >= FUSED if "by version" in optimizer else optimizer.endswith("fused")


@contextmanager
def _around(row: Row, is_2d: bool) -> Iterator[None]:
    with row.as_compiled_then(), loss_parallel() if is_2d else nullcontext():
        yield


def compile_blocks(model: Titan, fullgraph: bool = True) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = torch.compile(layer, fullgraph=fullgraph)


def _mesh_of(row: Row) -> tuple[int, int]:
    """Data-parallel shards and tensor-parallel ways: `fsdp 4 × tp 2`."""
    words = row.data["parallelism"]["mesh"].replace("×", " ").split()
    sizes = {words[place]: int(words[place + 1]) for place in range(len(words) - 1) if words[place + 1].isdigit()}
    return sizes.get("fsdp", 1), sizes.get("tp", 1)


def meshes(shards: int, ways: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (shards, ways), mesh_dim_names=("dp", "tp"))


def _shard(model: Titan, mesh: Any, detail: str, ends_apart: bool) -> None:
    """Shard block by block; what is needed first in the backward stays gathered, unless all is to be gathered again."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    always, never = "everywhere" in detail, detail.startswith("no reshard")
    last = None if ends_apart else str(len(model.layers) - 1)
    for name, layer in model.layers.items():
        fully_shard(layer, **how, reshard_after_forward=always or not (never or name == last))
    if ends_apart:
        fully_shard(model.tok_embeddings, **how, reshard_after_forward=not never)
        fully_shard([model.norm, model.output], **how, reshard_after_forward=always)
    fully_shard(model, **how, reshard_after_forward=always)


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


def checkpoint(model: Any, how: str) -> None:
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


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=2e-5, fused=True)


def foreach_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, foreach=True)


def hardware_of(row: Row) -> str:
    name, count = _GPUS[row.data["gpu"]["type"]], row.num_gpus
    return f"{count // 8}x8x{name}" if count > 8 else f"{count}x{name}"
