"""Products of runs of rows, each run with a matrix of its own: what the experts of a mixture compute.

    grouped_mm      rows [n, i], matrices [g, i, o], ends [g]  →  [n, o]:      out[ends[j-1]:ends[j]] = rows[…] @ matrices[j]
    grouped_outer   left [n, a], right [n, b], ends [g]        →  [g, a, b]:   out[j] = left[…].T @ right[…]

Each is the other's gradient, so both can be differentiated any number of times. They are ops, so that whoever follows a step
on fakes sees one call: a call's shapes do not depend on how the rows fall to the runs. bf16 on a GPU takes torch's grouped
kernel where its alignment allows; all else is one product a run, the only way that also has float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.utils.flop_counter import register_flop_formula

_LIBRARY = library.Library("trainwright", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_LIBRARY.define("grouped_outer(Tensor left, Tensor right, Tensor ends) -> Tensor")
_ALIGNED_BYTES = 16


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each run of `rows` with its own matrix.

    rows: [n, i], those of one run consecutive. matrices: [g, i, o]. ends: [g], int32, where each run ends; the last is n.
    Returns [n, o].

    >>> rows, matrices = torch.ones(3, 2), torch.stack([torch.ones(2, 1), 2 * torch.ones(2, 1)])
    >>> grouped_mm(rows, matrices, torch.tensor([1, 3], dtype=torch.int32)).flatten()
    tensor([2., 4., 4.])
    """
    return _Product.apply(rows, matrices, ends)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return, for each run, the sum of the outer products of its rows: [n, a], [n, b] → [g, a, b]; zeros for an empty run."""
    return _Outer.apply(left, right, ends)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return _MM(rows, matrices, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, matrices, ends = ctx.saved_tensors
        return grouped_mm(grads[0], matrices.transpose(1, 2), ends), grouped_outer(rows, grads[0], ends), None


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, ends)
        return _OUTER(left, right, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right, ends = ctx.saved_tensors
        return grouped_mm(right, grads[0].transpose(1, 2), ends), grouped_mm(left, grads[0], ends), None


def _run_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for number, (start, stop) in enumerate(_runs(ends)):
        torch.mm(rows[start:stop], matrices[number], out=out[start:stop])
    return out


def _run_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(left, right):
        return F.grouped_mm(left.T, right, offs=ends)
    out = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    for number, (start, stop) in enumerate(_runs(ends)):
        torch.mm(left[start:stop].T, right[start:stop], out=out[number])
    return out


def _runs(ends: Tensor) -> list[tuple[int, int]]:
    bounds = [0, *ends.tolist()]
    return list(itertools.pairwise(bounds))


def _has_kernel(*operands: Tensor) -> bool:
    """Tell whether torch's grouped kernel takes them: bf16 on a GPU, each row on a boundary of 16 bytes."""
    if any(not operand.is_cuda or operand.dtype != torch.bfloat16 or not operand.numel() for operand in operands):
        return False
    strides = [stride * operand.element_size() for operand in operands for stride in operand.stride() if stride != 1]
    return all(stride % _ALIGNED_BYTES == 0 for stride in strides)


def _fake_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


def _fake_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


_LIBRARY.impl("grouped_mm", _run_mm, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_outer", _run_outer, "CompositeExplicitAutograd")
library.register_fake("trainwright::grouped_mm", _fake_mm, lib=_LIBRARY)
library.register_fake("trainwright::grouped_outer", _fake_outer, lib=_LIBRARY)
_MM, _OUTER = torch.ops.trainwright.grouped_mm.default, torch.ops.trainwright.grouped_outer.default


@register_flop_formula(torch.ops.trainwright.grouped_mm)
def _mm_flops(rows: Any, matrices: Any, ends: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * rows[0] * matrices[1] * matrices[2])


@register_flop_formula(torch.ops.trainwright.grouped_outer)
def _outer_flops(left: Any, right: Any, ends: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])
