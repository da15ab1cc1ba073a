"""Computes fake results of calls that the CPU supports and fake tensors reject: their shape function applies CUDA's rules,
or needs values that are known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def run_fake_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the fake result of `func(*args, **kwargs)`; NotImplemented if torch's own shape function is to be used.

    Call it outside of the fake mode, so that known values can be read.

    >>> rows, matrices = torch.empty(20, 16), torch.empty(4, 16, 8)
    >>> ends = torch.tensor([3, 8, 8, 20], dtype=torch.int32)
    >>> run_fake_kernel(torch.ops.aten._grouped_mm.default, (rows, matrices, ends), {}).shape
    torch.Size([20, 8])
    """
    kernel = _FAKE_KERNELS.get(func)
    return NotImplemented if kernel is None else kernel(*args, **kwargs)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the fake product of `a`'s groups of rows, each with its own matrix of `b`; of two 2-D operands, one matrix a group."""
    rows, columns = a.shape[-2], b.shape[-1]
    if (a.dim(), b.dim()) == (2, 2):
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], rows, columns)
    elif (a.dim(), b.dim()) == (3, 3):
        shape = (a.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    """Return the fake loss of each sample, and log α [batch, time, 2 · the longest target + 1]."""
    if type(target_lengths) is not Tensor and isinstance(target_lengths, Tensor):
        return NotImplemented  # no values
    longest = max((int(length) for length in target_lengths), default=0)
    time, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * longest + 1)


_FAKE_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
}
