"""Replaces functions by the form that they have on a CUDA device, where fake CPU tensors would take another one.

    attention    fp16, bf16, no mask: the flash kernel, which keeps q, k, v, out, a log-sum-exp and a seed;
                 with a mask, or fp32: the memory-efficient kernel, which keeps the same; else (fp64, odd head dims):
                 scores and softmax, quadratic. Dropout is inside the fused kernels (a CPU falls back to scores for it)
    dropout      a fused kernel that keeps a mask of bytes (a CPU keeps the scaled mask, as wide as the values)
    autocast     CUDA's list of ops that run in fp32

Where torch prefers cuDNN's attention (Hopper with a recent cuDNN), it keeps what the flash kernel keeps. Sizes come
from torch's own shape functions of these kernels. From documentation and source, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_internals import private

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD_DIM = 256
_BIAS_ALIGNMENT = 16
"""The number of elements to a multiple of which the memory-efficient kernel needs a mask's rows padded."""

_IN_FP32 = frozenset(
    [
        "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits",
        "cosh", "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "dist", "erfinv", "exp",
        "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10",
        "log_softmax", "log1p", "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss",
        "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "reciprocal",
        "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "renorm", "tan",
        "triplet_margin_loss",
    ]
)  # fmt: skip
"""The ops that autocast runs in fp32 on CUDA, as torch documents them; sums and products get `dtype=float32` instead."""
_ACCUMULATED_IN_FP32 = frozenset({"sum", "prod", "cumsum", "cumprod"})


class GpuForms(TorchFunctionMode):
    """Torch function mode for forward and backward: calls on CPU tensors take the form that they have on a CUDA device.

    >>> x = torch.zeros(2, 3, requires_grad=True)
    >>> with GpuForms():
    ...     kept = F.dropout(x, 0.5).grad_fn
    >>> kept.name()
    'NativeDropoutBackward0'
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = _widened(getattr(func, "__name__", ""), args, kwargs)
        if func is Tensor.backward:  # what checkpointed blocks recompute in it takes the same forms
            with self:
                _backward(*args, **kwargs)
            return None
        if func is F.multi_head_attention_forward:
            with _replaced():
                return func(*args, **kwargs)
        return _FORMS.get(func, func)(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with the ops of the kernel that a CUDA device (Ampere or later) selects.

    query [b, h, s_q, d]; key, value [b, h or its groups, s_k, d]; attn_mask boolean or added to the scores.
    """
    query, key, value = _autocast(query, key, value)
    kernel = attention_kernel(query, key, value, attn_mask, is_causal, enable_gqa)
    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if kernel == "efficient":
        bias = None if attn_mask is None else _aligned(_added(attn_mask, query.dtype), query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, _needs_grad(query, key, value), dropout_p, is_causal, scale=scale
        )[0]
    return _scores(query, key, value, attn_mask, dropout_p, is_causal, scale)


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool = False
) -> str:
    """Return the attention kernel that CUDA selects: the first of `flash`, `efficient`, `math` that supports the arguments.

    >>> q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16, device="meta")
    >>> attention_kernel(q, q, q, None, True), attention_kernel(q, q, q, torch.ones(8, 8), False)
    ('flash', 'efficient')
    """
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.dtype is not query.dtype or 0 in tensor.shape for tensor in tensors):
        return "math"
    if key.shape[1] != query.shape[1] and not enable_gqa:
        return "math"
    head_dims = {tensor.shape[-1] for tensor in tensors}
    is_square = query.shape[-2] == key.shape[-2]
    fits_flash = len(head_dims) == 1 and max(head_dims) <= _FLASH_MAX_HEAD_DIM and (is_square or not is_causal)
    if query.dtype in _HALVES and attn_mask is None and fits_flash:
        return "flash"
    alignment = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}.get(query.dtype)
    if alignment is not None and all(size % alignment == 0 for size in head_dims):
        return "efficient"
    return "math"


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    head_dim = query.shape[-1]
    missing = -head_dim % 8
    if missing:  # the kernel takes head dims of whole multiples of 8
        scale = scale or 1 / math.sqrt(head_dim)
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head_dim] if missing else out


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Compute attention by its definition, as the math kernel does: scores, softmax and dropout mask are all materialised."""
    root = math.sqrt(scale or 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.add_(_added(attn_mask, query.dtype))
    weights = scores.softmax(-1)
    return dropout(weights, dropout_p) @ value


def _added(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask in additive form: a boolean one becomes 0 where it is true and −∞ where it is false."""
    if attn_mask.dtype is not torch.bool:
        return attn_mask
    zero = torch.zeros_like(attn_mask, dtype=dtype)
    return zero.masked_fill_(attn_mask.logical_not(), -math.inf)


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    num_keys = key.shape[-2]
    if bias.shape[-1] == num_keys and num_keys % _BIAS_ALIGNMENT:
        bias = F.pad(bias, (0, -num_keys % _BIAS_ALIGNMENT))[..., :num_keys]
    return bias.expand(*query.shape[:-1], num_keys)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to autocast's dtype, since attention is on autocast's list of low-precision ops."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(tensor.to(dtype) if tensor.dtype in (torch.float32, *_HALVES) else tensor for tensor in tensors)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute `F.dropout` with CUDA's fused kernel, which saves a mask of one byte per element."""
    if not training or not 0 < p < 1 or inplace:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, training)[0]


def _torch_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(input, p, train)


_FORMS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    F.dropout: dropout,
    torch.dropout: _torch_dropout,
}


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run the autograd engine for `Tensor.backward`, without the function-mode dispatch that would call this mode again."""
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    inputs = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    private.run_backward(tensor, gradient, create_graph if retain_graph is None else retain_graph, create_graph, inputs)


@contextmanager
def _replaced() -> Iterator[None]:
    """Patch `F`'s attention and dropout while the context lasts, for functions whose inner calls reach no function mode."""
    names = ("scaled_dot_product_attention", "dropout")
    before = [getattr(F, name) for name in names]
    try:
        for name, function in zip(names, before):
            setattr(F, name, _FORMS.get(function, function))
        yield
    finally:
        for name, function in zip(names, before):
            setattr(F, name, function)


def _widened(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as CUDA's autocast would pass them to the op `name`: in fp32 for ops on its fp32 list."""
    if name in _ACCUMULATED_IN_FP32 and args and _is_half(args[0]) and "dtype" not in kwargs:
        return args, {**kwargs, "dtype": torch.float32}
    if name not in _IN_FP32:
        return args, kwargs
    return tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}


def _wide(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALVES
