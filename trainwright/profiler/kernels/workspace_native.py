"""What ATen's own CPU kernels take inside one call: temporaries of the tensors' sizes, written down kernel by kernel.

    elementwise, mixed types   each operand of another type than the common one is cast, whole
    softmax, norms, pooling    each operand that is not contiguous is copied
    reductions of bf16, fp16   the operand in fp32

Each entry was found by running the kernel under the allocator's records; `tests/profiler/test_profiler_workspace.py` does so
again. Scalars (a Python number becomes a tensor of 8 bytes, and its cast of 4) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Arguments = tuple[Any, ...]
Estimate = Callable[[Arguments, Any], int]
_REDUCED = (torch.bfloat16, torch.float16)
_FP32_BYTES = 4
_INDEX_BYTES = 8


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor shows, whatever lies under it.

    >>> num_bytes(torch.empty(5, 1).expand(5, 7))
    140
    """
    return tensor.numel() * tensor.element_size()


def is_reduced(tensor: Tensor) -> bool:
    """Tell whether a tensor is bf16 or fp16."""
    return tensor.dtype in _REDUCED


def elementwise_bytes(args: Arguments, out: Any) -> int:
    """The operands of another type than the common one, cast; `args` without what is no operand (a mask).

    >>> elementwise_bytes((torch.empty(6, 7), torch.empty(6, 7, dtype=torch.bfloat16)), torch.empty(6, 7))
    168
    """
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    if len(operands) < 2 or all(operand.dtype is operands[0].dtype for operand in operands[1:]):
        return 0
    common = _common_type(operands)
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype is not common)


def _in_place_bytes(args: Arguments, out: Any) -> int:
    """As elsewhere; and where the target has another type than the common one, the result before it is cast."""
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    common = _common_type(operands)
    result = 0 if operands[0].dtype is common else operands[0].numel() * common.itemsize
    return elementwise_bytes(args, out) + result


def _common_type(operands: Sequence[Tensor]) -> torch.dtype:
    """Promotion looks at operands with dimensions first: a tensor without counts only by its kind of number."""
    common = operands[0]
    for operand in operands[1:]:
        wider = common if common.dim() >= operand.dim() else operand
        dtype = common.dtype if operand.dtype is common.dtype else torch.result_type(common, operand)
        common = wider if wider.dtype is dtype else torch.empty((1,) * wider.dim(), dtype=dtype, device="meta")
    return common.dtype


def _true_division(args: Arguments, out: Any) -> int:
    """Integers divide as floats."""
    operands = [arg for arg in args[:2] if isinstance(arg, Tensor)]
    if any(operand.is_floating_point() for operand in operands):
        return elementwise_bytes(args, out)
    return sum(operand.numel() * out.element_size() for operand in operands)


def _where(args: Arguments, out: Any) -> int:
    return elementwise_bytes(args[1:], out)


def _copies(*positions: int) -> Estimate:
    """Contiguous copies of the arguments at `positions` that are not contiguous."""

    def estimate(args: Arguments, out: Any) -> int:
        return sum(_copy_bytes(args[position]) for position in positions)

    return estimate


def _copy_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_contiguous() else num_bytes(tensor)


def _safe_softmax(args: Arguments, out: Tensor) -> int:
    """The copy is gone when the rows that are masked whole are looked for."""
    rows = out.numel() // max(1, out.shape[args[1]])
    return max(_copy_bytes(args[0]), out.numel() + rows + out.element_size())


def _layer_norm_backward(args: Arguments, out: Sequence[Tensor | None]) -> int:
    grad, x, normalized_shape, *_, mask = args[:8]
    width = 1
    for size in normalized_shape:
        width *= size
    partial_sums = 2 * torch.get_num_threads() * width * x.element_size() if mask[1] or mask[2] else 0
    return _copy_bytes(grad) + _copy_bytes(x) + partial_sums


def _batch_norm(args: Arguments, out: Sequence[Tensor]) -> int:
    """The statistics, and what they become."""
    x, is_training = args[0], args[5]
    if not is_training:
        return 2 * x.shape[1] * _FP32_BYTES
    per_thread = 0 if x.is_contiguous() and x.dim() > 2 else torch.get_num_threads()
    return (2 + per_thread) * x.shape[1] * _FP32_BYTES


def _batch_norm_backward(args: Arguments, out: Sequence[Tensor | None]) -> int:
    """Where gradient and input lie alike, the input's gradient is made twice; elsewhere it is made channel by channel."""
    grad, x, mask = args[0], args[1], args[9]
    sums = 2 * x.shape[1] * _FP32_BYTES
    layout = _image_layout(x)
    if layout is None or not grad.is_contiguous(memory_format=layout):
        return sums + (x.numel() * _FP32_BYTES if is_reduced(x) else 0)
    doubled = num_bytes(x) if mask[0] else 0
    by_thread = layout is not torch.contiguous_format or x.dim() == 2
    return max(doubled, sums * torch.get_num_threads() if by_thread else 0)


def _image_layout(x: Tensor) -> torch.memory_format | None:
    """Contiguous, or channels-last; None for neither."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if x.is_contiguous():
        return torch.contiguous_format
    return last if last is not None and x.is_contiguous(memory_format=last) else None


def _gelu_backward(args: Arguments, out: Tensor) -> int:
    """oneDNN's, where the input is contiguous; it copies a gradient that is not, and the copy."""
    grad, x = args[:2]
    return 2 * num_bytes(grad) if x.is_contiguous() and not grad.is_contiguous() else elementwise_bytes(args, out)


def _sum(args: Arguments, out: Tensor) -> int:
    """The operand in the result's type, where that is another; bf16 in fp32, where the sum runs over split dims."""
    x, dims = args[0], args[1] if len(args) > 1 else None
    if x.dtype is not out.dtype:
        return x.numel() * out.element_size()
    if is_reduced(x) and _num_runs(x, dims) > 1:
        return _in_fp32(args, out)
    return 0


def _in_fp32(args: Arguments, out: Tensor) -> int:
    """Operand and result in fp32, where they are bf16 or fp16."""
    return (args[0].numel() + out.numel()) * _FP32_BYTES if is_reduced(args[0]) else 0


def _num_runs(x: Tensor, dims: Sequence[int] | None) -> int:
    """Into how many runs of neighbours in memory the reduced dims fall."""
    reduced = range(x.dim()) if not dims else [dim % x.dim() for dim in dims]
    ordered = sorted((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=lambda dim: x.stride(dim))
    flags = [dim in reduced for dim in ordered]
    return sum(flag and not before for before, flag in zip([False, *flags], flags))


def _cumulative(args: Arguments, out: Tensor) -> int:
    """The operand in the result's type."""
    return num_bytes(out) if args[0].dtype is not out.dtype else 0


def _result_in_fp32(args: Arguments, out: Tensor) -> int:
    return out.numel() * _FP32_BYTES if is_reduced(args[0]) else 0


def _target_in_fp32(args: Arguments, out: Tensor) -> int:
    return args[0].numel() * _FP32_BYTES if is_reduced(args[0]) else 0


def _roll(args: Arguments, out: Tensor) -> int:
    """One dim after the other."""
    return max(0, len(args[1]) - 1) * num_bytes(out)


def _elements_of_loss(num_copies: int) -> Estimate:
    """A loss before it is summed up."""

    def estimate(args: Arguments, out: Tensor) -> int:
        return num_copies * num_bytes(args[0]) if out.dim() == 0 else 0

    return estimate


def _logsumexp(args: Arguments, out: Tensor) -> int:
    return num_bytes(args[0]) + num_bytes(out)


def _masked_scatter_backward(args: Arguments, out: Tensor) -> int:
    """The mask, expanded, and where each of its elements goes."""
    return 2 * args[0].numel() * _INDEX_BYTES


def _ctc_loss_backward(args: Arguments, out: Tensor) -> int:
    return num_bytes(args[6])


_LOSSES = {aten.mse_loss: 1, aten.smooth_l1_loss: 1, aten.huber_loss: 1, aten.binary_cross_entropy_with_logits: 2}
_SCATTERS = (aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value)

ESTIMATES: dict[Any, Estimate] = {
    aten._log_softmax.default: _copies(0),
    aten._softmax.default: _copies(0),
    aten._log_softmax_backward_data.default: _copies(0, 1),
    aten._softmax_backward_data.default: _copies(0, 1),
    aten._safe_softmax.default: _safe_softmax,
    aten.native_layer_norm.default: _copies(0),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.nll_loss_forward.default: _copies(0),
    aten.embedding.default: _copies(1),
    aten.embedding_dense_backward.default: _copies(0, 1),
    aten.gelu_backward.default: _gelu_backward,
    aten.div.Tensor: _true_division,
    aten.where.self: _where,
    aten.masked_fill.Scalar: lambda args, out: 0,
    aten.masked_fill_.Scalar: lambda args, out: 0,
    aten.clone.default: lambda args, out: 0,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _in_fp32,
    aten.mean.dim: _in_fp32,
    aten.cumsum.default: _cumulative,
    aten.gather.default: _result_in_fp32,
    aten.scatter_add.default: _target_in_fp32,
    aten.scatter_add_.default: _target_in_fp32,
    aten.roll.default: _roll,
    aten.logsumexp.default: _logsumexp,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    **{loss.default: _elements_of_loss(num_copies) for loss, num_copies in _LOSSES.items()},
    **dict.fromkeys(_SCATTERS, _target_in_fp32),
}


def estimate_of(func: Any) -> Estimate | None:
    """Return what estimates a native kernel's temporaries; None where it takes none that are known."""
    found = ESTIMATES.get(func)
    if found is not None:
        return found
    if torch.Tag.pointwise not in getattr(func, "tags", ()):
        return None
    return _in_place_bytes if func._schema.is_mutable else elementwise_bytes
