"""FLOPs and bytes of one ATen call, as a dispatch mode below autograd sees it.

    matmul [m, k] · [k, n]             2 m k n
    convolution, forward               2 · weight elements per output channel · output elements
    convolution, backward              the forward's, once for each of input and weight that needs a gradient
    attention, forward                 2 b h s_q s_k (d + d_v): the full square, also where the kernel skips half
    attention, backward                five such products: the scores anew, and the gradients of v, scores, q and k
    recurrent layer (fused)            2 · weight elements per step and sample
    anything else that computes        one per element of the larger of inputs and outputs ("other")
    views, allocations, copies         none

A product counts 2 per multiply-add. Ops with a formula in `torch.utils.flop_counter` but not here use that one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .registry import RULES

aten = torch.ops.aten
Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]


def flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    """Return (FLOPs of matmul, convolution, attention; other FLOPs) of the call `out = func(*args, **kwargs)`.

    Tensors may be real, fake or on the meta device: only shapes are read.

    >>> a, b = torch.zeros(3, 5), torch.zeros(5, 7)
    >>> flops(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    (210, 0)
    >>> flops(torch.ops.aten.add.Tensor, (a, a), {}, a + a)
    (0, 15)
    """
    packet = getattr(func, "overloadpacket", func)
    formula = _HEAVY.get(packet)
    if formula is not None:
        return formula(args, kwargs, out), 0
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out)), 0
    return 0, _other_flops(func, packet, args, out)


def is_heavy(func: Any) -> bool:
    """Tell whether the op is a matmul, a convolution or attention."""
    packet = getattr(func, "overloadpacket", func)
    return packet in _HEAVY or packet in flop_registry


def is_convolution(func: Any) -> bool:
    """Tell whether the op is a convolution or its backward."""
    return getattr(func, "overloadpacket", func) in _CONVOLUTIONS


def bytes_moved(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that a call reads and writes: each tensor argument and each output once, views none.

    An expanded argument counts the memory behind it, not its shape. A lookup (`embedding`, `gather`: `OpRule.reads_rows`)
    reads as many bytes as it writes.

    >>> a = torch.zeros(10)
    >>> bytes_moved(torch.ops.aten.add.Tensor, (a, a), a + a)
    120
    >>> bytes_moved(torch.ops.aten.view.default, (a, [2, 5]), a.view(2, 5))
    0
    """
    if moves_nothing(func):
        return 0
    packet = getattr(func, "overloadpacket", func)
    written = sum(_num_bytes(tensor) for tensor in _tensors(out))
    if packet in _lookups():
        return 2 * written
    if packet in _FILLS:
        return written
    if not written:  # updates in place of lists, or of several tensors, return nothing
        written = sum(_num_bytes(tensor) for tensor in _tensors(_written(func, args)))
    if packet in _OVERWRITES:
        return written + sum(_num_bytes(tensor) for tensor in _tensors(args[1:]))
    return written + sum(_num_bytes(tensor) for tensor in _tensors(args))


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the positional arguments that an op writes, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    return [value for value, known in zip(args, schema.arguments) if known.alias_info and known.alias_info.is_write]


def moves_nothing(func: Any) -> bool:
    """Tell whether the op only makes a view or an allocation."""
    known = _FREE.get(func)
    if known is None:
        known = _FREE[func] = _only_a_view(func) or getattr(func, "overloadpacket", func) in _ALLOCATIONS
    return known


def _only_a_view(func: Any) -> bool:
    """Tell whether all tensor outputs of an op alias an argument that is not written, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    returns = [item.alias_info for item in schema.returns]
    return bool(returns) and all(info is not None and not info.is_write for info in returns)


def _other_flops(func: Any, packet: Any, args: tuple[Any, ...], out: Any) -> int:
    if packet in _COPIES or moves_nothing(func):
        return 0
    sizes = [tensor.numel() for tensor in _tensors(out)]
    if packet not in _lookups():
        sizes += [tensor.numel() for tensor in _tensors(args)]
    return max(sizes, default=0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes behind a tensor's elements; dims of stride 0 count once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        if stride != 0 or size == 0:
            numel *= size
    return numel * tensor.element_size()


def _mm(args, kwargs, out) -> int:
    return 2 * out.numel() * args[0].shape[-1]


def _addmm(args, kwargs, out) -> int:
    return 2 * out.numel() * args[1].shape[-1]


def _addbmm(args, kwargs, out) -> int:
    return 2 * out.numel() * args[1].shape[-1] * args[1].shape[0]


def _dot(args, kwargs, out) -> int:
    return 2 * args[0].numel()


def _outer(args, kwargs, out) -> int:
    return 2 * out.numel()


def _convolution(args, kwargs, out) -> int:
    return _convolution_flops(args[0], args[1], out, transposed=bool(args[6]) if len(args) > 6 else False)


def _mkldnn_convolution(args, kwargs, out) -> int:
    return _convolution_flops(args[0], args[1], out, transposed=False)


def _convolution_backward(args, kwargs, out) -> int:
    grad_out, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return _convolution_flops(x, weight, grad_out, transposed) * (bool(mask[0]) + bool(mask[1]))


def _convolution_flops(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> int:
    """x [n, c_in, *]; weight [c_out, c_in/groups, *] or transposed [c_in, c_out/groups, *]; out [n, c_out, *]."""
    per_position = math.prod(weight.shape[1:])
    return 2 * per_position * (x if transposed else out).numel()


def _attention_forward(args, kwargs, out) -> int:
    query, key, value = args[:3]
    return 2 * _score_elements(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(args, kwargs, out) -> int:
    query, key, value = args[1:4]
    return 2 * _score_elements(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _score_elements(query: Tensor, key: Tensor) -> int:
    """query [b, h, s_q, d]; key [b, h or its groups, s_k, d]."""
    return math.prod(query.shape[:-1]) * key.shape[-2]


def _rnn_layer(args, kwargs, out) -> int:
    """x [s, b, i] or [b, s, i]; weights w0 [gates, i] and w1 [gates, hidden]."""
    x, w0, w1 = args[:3]
    return 2 * math.prod(x.shape[:-1]) * (w0.numel() + w1.numel())


def _rnn_layer_backward(args, kwargs, out) -> int:
    x, w0, w1 = args[:3]
    return 4 * math.prod(x.shape[:-1]) * (w0.numel() + w1.numel())


def _named(*names: str) -> list[Any]:
    """Return the ATen ops of these names that this torch has."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


@functools.cache
def _lookups() -> frozenset[Any]:
    """Return the ATen ops that look their results up in their first operand."""
    return frozenset(_named(*(name for name, rule in RULES.items() if rule.reads_rows)))


_CONVOLUTIONS = set(
    _named(
        "convolution",
        "_convolution",
        "convolution_overrideable",
        "mkldnn_convolution",
        "cudnn_convolution",
        "convolution_backward",
        "convolution_backward_overrideable",
        "_slow_conv2d_forward",
        "slow_conv3d_forward",
        "_conv_depthwise2d",
    )
)
_HEAVY: dict[Any, Formula] = {
    **dict.fromkeys(_named("mm", "bmm", "mv", "linear", "matmul", "_int_mm"), _mm),
    **dict.fromkeys(_named("addmm", "baddbmm", "addmv", "_addmm_activation"), _addmm),
    **dict.fromkeys(_named("addbmm"), _addbmm),
    **dict.fromkeys(_named("dot", "vdot"), _dot),
    **dict.fromkeys(_named("addr"), _outer),
    **dict.fromkeys(
        _named("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution"), _convolution
    ),
    **dict.fromkeys(_named("mkldnn_convolution"), _mkldnn_convolution),
    **dict.fromkeys(_named("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(
        _named(
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention_forward,
    ),
    **dict.fromkeys(
        _named(
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
    **dict.fromkeys(_named("mkldnn_rnn_layer"), _rnn_layer),
    **dict.fromkeys(_named("mkldnn_rnn_layer_backward"), _rnn_layer_backward),
}
_COPIES = set(
    _named(
        "clone",
        "copy_",
        "copy",
        "_to_copy",
        "cat",
        "stack",
        "fill_",
        "zero_",
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "scalar_tensor",
        "new_zeros",
        "new_ones",
        "new_full",
        "lift_fresh",
        "lift_fresh_copy",
        "constant_pad_nd",
        "_local_scalar_dense",
        "slice_backward",
        "select_backward",
        "embedding",
        "index_select",
        "gather",
        "roll",
        "flip",
        "repeat",
        "contiguous",
        "_reshape_copy",
        "expand_copy",
        "view_copy",
    )
)
_ALLOCATIONS = set(
    _named("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "alias")
)
_FILLS = set(
    _named(
        *("fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like"),
        *("new_zeros", "new_ones", "new_full", "bernoulli_", "normal_", "uniform_", "rand_like", "randn_like"),
    )
)
"""Ops that write and read nothing: a tensor among their arguments gives its shape, or is the one that they write."""
_OVERWRITES = set(_named("copy_"))
"""Ops that write their first argument without reading it."""
_FREE: dict[Any, bool] = {}
