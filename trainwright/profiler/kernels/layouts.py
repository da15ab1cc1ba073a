"""Corrects fake results whose strides, dtype or memory differ from those that the CPU kernel makes.

Wrong strides add a copy further on (`reshape`, `contiguous`) that the real step does not make, or hide one that it
makes. The entries were found by running each op, fake and real, on all orders of its argument's dims. Statistics that
norms save for their backward have the dtype of their parameters, not of their input. Some losses give a number in the
memory of the losses of all elements, which lasts as long as the number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def lay_out(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return the fake result `out` of `func(*args)` with the strides, dtypes and memory that the CPU kernel gives it."""
    if func in _STATISTICS:
        out = _typed_statistics(args, out, _STATISTICS[func])
    if func is aten.mkldnn_rnn_layer_backward.default:
        return (*out[:4], torch.empty_like(out[4]), *out[5:])  # the two biases' gradients do not share memory
    if func in _LOSSES_IN_PLACE and out.dim() == 0:
        num_elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return torch.empty(max(1, num_elements), dtype=out.dtype, device=out.device).as_strided((), ())
    strides_like = _FIRST_OUTPUT.get(func)
    if strides_like is None:
        return out
    first = out if isinstance(out, Tensor) else out[0]
    if first is None:
        return out
    model = strides_like(args, first)
    if first.stride() == model.stride():
        return out
    return model if isinstance(out, Tensor) else (model, *out[1:])


def _typed_statistics(args: tuple[Any, ...], out: Any, parameters: slice) -> Any:
    """Return `out` with the mean and deviation in the dtype of the norm's parameters, if it has any."""
    dtype = next((tensor.dtype for tensor in args[parameters] if tensor is not None), args[0].dtype)
    return out if dtype is out[1].dtype else (out[0], *(tensor.to(dtype) for tensor in out[1:]))


def _contiguous(args: tuple[Any, ...], out: Tensor) -> Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _image_like(position: int) -> Callable[[tuple[Any, ...], Tensor], Tensor]:
    """Return a rule that makes the output channels-last if the argument at `position` is, and contiguous otherwise."""

    def build(args: tuple[Any, ...], out: Tensor) -> Tensor:
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(out.dim(), torch.contiguous_format)
        source = args[position]
        keeps = source.is_contiguous(memory_format=layout) and not source.is_contiguous()
        return torch.empty_like(out, memory_format=layout if keeps else torch.contiguous_format)

    return build


def _as_argument(position: int) -> Callable[[tuple[Any, ...], Tensor], Tensor]:
    def build(args: tuple[Any, ...], out: Tensor) -> Tensor:
        return torch.empty_like(args[position], dtype=out.dtype)

    return build


_FIRST_OUTPUT: dict[Any, Callable[[tuple[Any, ...], Tensor], Tensor]] = {
    aten.native_layer_norm_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.mse_loss_backward.default: _contiguous,
    aten.native_batch_norm.default: _image_like(0),
    aten.native_batch_norm_backward.default: _image_like(1),
    aten.hardswish_backward.default: _as_argument(0),
}
_LOSSES_IN_PLACE = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}
_STATISTICS = {
    aten.native_layer_norm.default: slice(2, 4),
    aten.native_batch_norm.default: slice(1, 5),
    aten.native_group_norm.default: slice(1, 3),
}
"""For each norm, the positions of its parameters and running statistics among the arguments."""
