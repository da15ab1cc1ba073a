"""LoRA and QLoRA: a frozen model whose linear layers have a trained product of low rank beside them.

    y = W x + α/r · B (A x),   A of r × in, B of out × r; W frozen

In QLoRA W is kept in 4 bits (NF4, blocks of 64, their scales in 8 bits again) and brought to the inputs' dtype by one kernel for
each product, forward and backward. For profiles of what fine-tuning takes; PEFT is what trains.

Hu et al., LoRA, arXiv:2106.09685; Dettmers et al., QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from ..artifacts import UserError

Way = Literal["lora", "qlora"]
RANK = 16
BLOCK, SCALES = 64, 256
"""Elements that share a scale, and scales that share one of theirs."""
_NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1]: Dettmers et al., appendix E."""


def with_adapters(model: nn.Module, way: Way, rank: int = RANK) -> nn.Module:
    """Freeze `model` and give each of its linear layers but the output's adapters of `rank`; it is changed in place.

    way: `lora`; or `qlora`, whose frozen weights are in 4 bits. Embeddings, norms and the layer that makes the logits stay as
    they are, frozen. Raises `UserError` where there is no linear layer to adapt.

    >>> model = with_adapters(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), "qlora", rank=2)
    >>> sum(param.numel() for param in model.parameters() if param.requires_grad)
    256
    """
    model.requires_grad_(False)
    chosen = _linear_layers(model)
    if not chosen:
        raise UserError(
            f"linear layers inside the model are needed for {way}; it has none but its last; train all of it"
        )
    for name in chosen:
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], _Adapted(model.get_submodule(name), way, rank))
    return model


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight's codes, two to a byte, the scales of its blocks in 8 bits, and the scales of those in fp32."""
    blocks = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    groups = F.pad(largest, (0, -len(largest) % SCALES)).view(-1, SCALES)
    group_scales = groups.amax(1).clamp_min(1e-30)
    scales = (groups / group_scales[:, None] * 255).round().clamp_min(1).to(torch.uint8).flatten()[: len(largest)]
    used = _scales(scales, group_scales)
    codebook = torch.tensor(_NF4, device=weight.device)
    middles = (codebook[1:] + codebook[:-1]) / 2
    codes = torch.bucketize(blocks / used[:, None], middles).to(torch.uint8).flatten()
    return codes[::2] << 4 | codes[1::2], scales, group_scales


@library.custom_op("trainwright::dequantise_nf4", mutates_args=())
def dequantise(codes: Tensor, scales: Tensor, group_scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return the weight of `quantised` codes, as one kernel would."""
    codebook = torch.tensor(_NF4, device=codes.device)
    values = codebook[torch.stack([codes >> 4, codes & 15], 1).flatten().int()].view(-1, BLOCK)
    whole = (values * _scales(scales, group_scales)[:, None]).flatten()
    rows, columns = shape
    return whole[: rows * columns].view(rows, columns).to(dtype)


@dequantise.register_fake
def _dequantised(codes: Tensor, scales: Tensor, group_scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


def _scales(scales: Tensor, group_scales: Tensor) -> Tensor:
    return scales.float() / 255 * group_scales.repeat_interleave(SCALES)[: len(scales)]


class _Product(torch.autograd.Function):
    """x Wᵀ, which keeps the codes of W and not W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, group_scales: Tensor, shape: list[int]) -> Tensor:
        ctx.save_for_backward(codes, scales, group_scales)
        ctx.shape = shape
        return F.linear(x, dequantise(codes, scales, group_scales, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return grad @ dequantise(*ctx.saved_tensors, ctx.shape, grad.dtype), None, None, None, None


class _Adapted(nn.Module):
    """A frozen linear layer with its adapters."""

    def __init__(self, base: nn.Module, way: Way, rank: int) -> None:
        super().__init__()
        weight = base.weight
        assert isinstance(weight, Tensor)
        is_turned = not isinstance(base, nn.Linear)  # transformers' Conv1D keeps in × out
        out_features, in_features = reversed(weight.shape) if is_turned else weight.shape
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.down = nn.Parameter(torch.randn(rank, in_features, **like) / rank)
        self.up = nn.Parameter(torch.zeros(out_features, rank, **like))
        self.scale = 2.0  # α = 2 r
        self.base: nn.Module | None = base if way == "lora" else None
        if way == "qlora":
            self.shape = [out_features, in_features]
            self.bias = getattr(base, "bias", None)
            self._keep(weight.t() if is_turned else weight)

    def _keep(self, weight: Tensor) -> None:
        kept = quantised(weight) if weight.device.type != "meta" else _sizes(weight)
        for name, value in zip(("codes", "scales", "group_scales"), kept):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.base is not None:
            y = self.base(x)
        else:
            y = _Product.apply(x, self.codes, self.scales, self.group_scales, self.shape)
            y = y if self.bias is None else y + self.bias
        return y + F.linear(F.linear(x, self.down), self.up) * self.scale


def _sizes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors of the shapes that `quantised` gives, for a weight without values."""
    num_blocks = -(-weight.numel() // BLOCK)
    sizes = (num_blocks * BLOCK // 2, torch.uint8), (num_blocks, torch.uint8), (-(-num_blocks // SCALES), torch.float32)
    codes, scales, group_scales = (torch.empty(size, dtype=dtype, device=weight.device) for size, dtype in sizes)
    return codes, scales, group_scales


def _linear_layers(model: nn.Module) -> list[str]:
    """The linear layers by name but for the output's: the one the model says, or the last."""
    found = [name for name, module in model.named_modules() if _is_linear(module) and name]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None and len(found) > 1:
        return found[:-1]
    return [name for name in found if model.get_submodule(name) is not head]


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"
