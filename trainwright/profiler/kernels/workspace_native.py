"""Estimates the workspaces of ATen's own CPU kernels: temporaries of the tensors' sizes, by a formula for each kernel.

    elementwise, mixed dtypes  a cast copy of each operand whose dtype is not the common one
    softmax, norms, pooling    a contiguous copy of each operand that is not contiguous
    reductions of bf16, fp16   a copy of the operand in fp32
    products                   a contiguous copy of each operand that BLAS cannot read
    distances, medians, …      copies of operands: contiguous ones, or such that the kernel works in
    others, of conjugates      a copy of each

Each entry was found by running the kernel under the allocator's records; `tests/profiler/test_profiler_workspace.py` does so
again. Scalars (a Python number becomes a tensor of 8 bytes, and its cast of 4) are left out.
"""

from __future__ import annotations

import math
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
_SMALL_PRODUCT = 400
"""A batched product of fewer multiplications runs in a loop of its own."""


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, whatever the size of its storage.

    >>> num_bytes(torch.empty(5, 1).expand(5, 7))
    140
    """
    return tensor.numel() * tensor.element_size()


def is_reduced(tensor: Tensor) -> bool:
    """Tell whether a tensor is of reduced precision: bf16 or fp16."""
    return tensor.dtype in _REDUCED


def elementwise_bytes(args: Arguments, out: Any) -> int:
    """Return the bytes of the operands that are cast to the common dtype; `args` must hold operands only (no mask).

    >>> elementwise_bytes((torch.empty(6, 7), torch.empty(6, 7, dtype=torch.bfloat16)), torch.empty(6, 7))
    168
    """
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    if len(operands) < 2 or all(operand.dtype is operands[0].dtype for operand in operands[1:]):
        return 0
    common = _common_type(operands)
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype is not common)


def _in_place_bytes(args: Arguments, out: Any) -> int:
    """Return the bytes of an in-place op: those of cast operands, and of the result before it is cast to the target's dtype."""
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    common = _common_type(operands)
    result = 0 if operands[0].dtype is common else operands[0].numel() * common.itemsize
    return elementwise_bytes(args, out) + result


def _common_type(operands: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype to which torch promotes the operands; one without dims counts only by its kind of number."""
    common = operands[0]
    for operand in operands[1:]:
        wider = common if common.dim() >= operand.dim() else operand
        dtype = common.dtype if operand.dtype is common.dtype else torch.result_type(common, operand)
        common = wider if wider.dtype is dtype else torch.empty((1,) * wider.dim(), dtype=dtype, device="meta")
    return common.dtype


def _true_division(args: Arguments, out: Any) -> int:
    """Return the bytes of a division's cast operands; integers are divided as floats."""
    operands = [arg for arg in args[:2] if isinstance(arg, Tensor)]
    if any(operand.is_floating_point() for operand in operands):
        return elementwise_bytes(args, out)
    return sum(operand.numel() * out.element_size() for operand in operands)


def _where(args: Arguments, out: Any) -> int:
    return elementwise_bytes(args[1:], out)


def operand_copies(operands: Sequence[Tensor]) -> int:
    """Return the bytes of the contiguous copies that a product makes first of those operands that BLAS, or cuBLAS, cannot read.

    They read a matrix whose rows or columns are contiguous and do not overlap, at any distance from each other.

    >>> grad = torch.ones((), dtype=torch.half).expand(8, 6)  # as the backward of a sum makes it
    >>> operand_copies([grad, torch.ones(6, 4)[:, :2]])
    96
    """
    return sum(num_bytes(operand) for operand in operands if not _is_readable(operand))


def _is_readable(matrix: Tensor) -> bool:
    if matrix.dim() < 2 or 0 in matrix.shape:
        return True
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    by_rows = across == 1 and down >= max(1, columns) and not matrix.is_conj()  # BLAS conjugates what it transposes
    return by_rows or (down == 1 and across >= max(1, rows))


def _product(args: Arguments, out: Tensor) -> int:
    return operand_copies(args[:2])


def _batched_product(args: Arguments, out: Tensor) -> int:
    """One matrix is copied at a time; a product of few numbers needs no BLAS."""
    is_small = out.shape[1] * out.shape[2] * args[0].shape[2] < _SMALL_PRODUCT
    copied = (
        0 if is_small else operand_copies([each for each in args[:2] if not each.is_conj()]) // max(1, out.shape[0])
    )
    return copied + conjugated_bytes(args[:2])


def conjugated_bytes(operands: Sequence[Any]) -> int:
    """Return the bytes of the operands that are conjugates of what lies in memory, which most kernels copy first.

    >>> conjugated_bytes([torch.ones(3, dtype=torch.cfloat).conj(), torch.ones(3)])
    24
    """
    return sum(num_bytes(each) for each in operands if isinstance(each, Tensor) and each.is_conj())


def _with_bias(product: Estimate) -> Estimate:
    return lambda args, out: product(args[1:], out)


def _copies(*positions: int) -> Estimate:
    """Return the estimate of a kernel that copies those of the arguments at `positions` that are not contiguous."""

    def estimate(args: Arguments, out: Any) -> int:
        return sum(_copy_bytes(args[position]) for position in positions)

    return estimate


def _copy_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_contiguous() else num_bytes(tensor)


def _safe_softmax(args: Arguments, out: Tensor) -> int:
    """Return the larger of the contiguous copy and the masks that find fully masked rows; they are not alive at once."""
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
    """Return the bytes of statistics per channel: two fp32 rows, and in training one more a thread for some layouts."""
    x, is_training = args[0], args[5]
    if not is_training:
        return 2 * x.shape[1] * _FP32_BYTES
    per_thread = 0 if x.is_contiguous() and x.dim() > 2 else torch.get_num_threads()
    return (2 + per_thread) * x.shape[1] * _FP32_BYTES


def _batch_norm_backward(args: Arguments, out: Sequence[Tensor | None]) -> int:
    """Return the bytes of the sums, and of the copy of the input's gradient that is made if both tensors have one layout."""
    grad, x, mask = args[0], args[1], args[9]
    sums = 2 * x.shape[1] * _FP32_BYTES
    layout = _image_layout(x)
    if layout is None or not grad.is_contiguous(memory_format=layout):
        return sums + (x.numel() * _FP32_BYTES if is_reduced(x) else 0)
    doubled = num_bytes(x) if mask[0] else 0
    by_thread = layout is not torch.contiguous_format or x.dim() == 2
    return max(doubled, sums * torch.get_num_threads() if by_thread else 0)


def _image_layout(x: Tensor) -> torch.memory_format | None:
    """Return the tensor's memory format, contiguous or channels-last; None if it has neither."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if x.is_contiguous():
        return torch.contiguous_format
    return last if last is not None and x.is_contiguous(memory_format=last) else None


def _gelu_backward(args: Arguments, out: Tensor) -> int:
    """Return the bytes of a GELU's backward: oneDNN's, for a contiguous input, copies a non-contiguous gradient twice."""
    grad, x = args[:2]
    return 2 * num_bytes(grad) if x.is_contiguous() and not grad.is_contiguous() else elementwise_bytes(args, out)


def _sum(args: Arguments, out: Tensor) -> int:
    """Return the bytes of the operand cast to the result's dtype; bf16 takes fp32 copies if the reduced dims are not adjacent."""
    x, dims = args[0], args[1] if len(args) > 1 else None
    if x.dtype is not out.dtype:
        return x.numel() * out.element_size()
    if is_reduced(x) and _num_runs(x, dims) > 1:
        return _in_fp32(args, out)
    return 0


def _in_fp32(args: Arguments, out: Tensor) -> int:
    """Return the bytes of operand and result in fp32, if they are bf16 or fp16."""
    return (args[0].numel() + out.numel()) * _FP32_BYTES if is_reduced(args[0]) else 0


def _num_runs(x: Tensor, dims: Sequence[int] | None) -> int:
    """Return the number of runs of adjacent dims, in order of stride, into which the reduced dims fall."""
    reduced = range(x.dim()) if not dims else [dim % x.dim() for dim in dims]
    ordered = sorted((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=lambda dim: x.stride(dim))
    flags = [dim in reduced for dim in ordered]
    return sum(flag and not before for before, flag in zip([False, *flags], flags))


def _cumulative(args: Arguments, out: Tensor) -> int:
    """Return the bytes of the operand cast to the result's dtype."""
    return num_bytes(out) if args[0].dtype is not out.dtype else 0


def _result_in_fp32(args: Arguments, out: Tensor) -> int:
    return out.numel() * _FP32_BYTES if is_reduced(args[0]) else 0


def _target_in_fp32(args: Arguments, out: Tensor) -> int:
    return args[0].numel() * _FP32_BYTES if is_reduced(args[0]) else 0


def _roll(args: Arguments, out: Tensor) -> int:
    """Return the bytes of the intermediate results of a roll, which moves one dim after the other."""
    return max(0, len(args[1]) - 1) * num_bytes(out)


def _elements_of_loss(num_copies: int) -> Estimate:
    """Return the estimate of a loss that is reduced: `num_copies` tensors of its elements before the reduction."""

    def estimate(args: Arguments, out: Tensor) -> int:
        return num_copies * num_bytes(args[0]) if out.dim() == 0 else 0

    return estimate


def _logsumexp(args: Arguments, out: Tensor) -> int:
    return num_bytes(args[0]) + num_bytes(out)


def _masked_scatter_backward(args: Arguments, out: Tensor) -> int:
    """Return the bytes of the expanded mask and of the position of each of its elements."""
    return 2 * args[0].numel() * _INDEX_BYTES


def _ctc_loss_backward(args: Arguments, out: Tensor) -> int:
    return num_bytes(args[6])


def _whole_copy(position: int) -> Estimate:
    """Return the estimate of a kernel that copies the argument at `position`, and works in the copy."""
    return lambda args, out: num_bytes(args[position])


def _median(args: Arguments, out: Any) -> int:
    """Return the bytes of a copy in which the dim is consecutive, where it is not."""
    is_consecutive = args[0].dim() == 0 or args[0].stride(args[1]) == 1
    return 0 if is_consecutive else num_bytes(args[0])


def _inverse(args: Arguments, out: Any) -> int:
    """Return the bytes of the factors, and of their pivots: 5 for each row."""
    return num_bytes(args[0]) + 5 * args[0].shape[:-1].numel()


def _matrix_exp(args: Arguments, out: Tensor) -> int:
    """Return the bytes of the powers of a matrix: twelve for a norm above 1, fewer for smaller ones, whose values nobody knows.

    A batch is sorted by norms and takes ten of its size, and three numbers a matrix.
    """
    num_matrices = math.prod(out.shape[:-2])
    return 12 * num_bytes(out) if num_matrices == 1 else 10 * num_bytes(out) + 3 * num_matrices * out.element_size()


def _euclidean_distances(args: Arguments, out: Tensor) -> int:
    """Return the bytes of both operands with two columns more, whose product is squares, or of the first while it is made."""
    first, second = (tensor.shape[:-1].numel() for tensor in args[:2])
    width = args[0].shape[-1]
    columns = 2 * (first + second)
    made = first * (2 * width + 2) + columns - out.numel(), (first + second) * (width + 2) + columns - out.numel()
    return max((first + second) * (width + 2), *made) * args[0].element_size()


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
    aten.mm.default: _product,
    aten.mv.default: _product,
    aten.addmm.default: _with_bias(_product),
    aten.bmm.default: _batched_product,
    aten.baddbmm.default: _with_bias(_batched_product),
    aten.gather.default: _result_in_fp32,
    aten.scatter_add.default: _target_in_fp32,
    aten.scatter_add_.default: _target_in_fp32,
    aten.roll.default: _roll,
    aten._cdist_forward.default: _copies(0, 1),
    aten._cdist_backward.default: _copies(0, 1, 2),
    aten._euclidean_dist.default: _euclidean_distances,
    aten.searchsorted.Tensor: _copies(1),
    aten.median.default: _whole_copy(0),
    aten.median.dim: _median,
    aten.cholesky_solve.default: _whole_copy(1),
    aten.linalg_inv_ex.default: _inverse,
    aten.linalg_matrix_exp.default: _matrix_exp,
    aten._linalg_svd.default: _whole_copy(0),
    aten.logsumexp.default: _logsumexp,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    **{loss.default: _elements_of_loss(num_copies) for loss, num_copies in _LOSSES.items()},
    **dict.fromkeys(_SCATTERS, _target_in_fp32),
}


def estimate_of(func: Any) -> Estimate | None:
    """Return the function that estimates a native kernel's workspace; None if no workspace is known of it."""
    found = ESTIMATES.get(func)
    if found is not None:
        return found
    if torch.Tag.pointwise not in getattr(func, "tags", ()):
        return None
    return _in_place_bytes if func._schema.is_mutable else elementwise_bytes
