"""Answers questions about dtypes, and changes torch's default dtype for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def may_have_gradient(dtype: torch.dtype) -> bool:
    """Return True for the dtypes that autograd follows: floating-point and complex ones.

    >>> [may_have_gradient(dtype) for dtype in (torch.bfloat16, torch.complex64, torch.int64)]
    [True, True, False]
    """
    return dtype.is_floating_point or dtype.is_complex


def in_precision(dtype: torch.dtype, precision: torch.dtype) -> torch.dtype:
    """Return `dtype` in the precision of a floating-point dtype, complex if it is; others as they are.

    >>> [in_precision(dtype, torch.float64) for dtype in (torch.bfloat16, torch.complex64, torch.int64)]
    [torch.float64, torch.complex128, torch.int64]
    """
    if dtype.is_complex:
        return precision.to_complex()
    return precision if dtype.is_floating_point else dtype


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` torch's default inside.

    >>> with default_dtype(torch.float64):
    ...     (torch.arange(2) * 0.5).dtype
    torch.float64
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
