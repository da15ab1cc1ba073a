"""FRUGAL's step as one pass over memory, in C++ on the CPU (`numerics/subspace.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import numerics
from ..artifacts import UserError
from ..numerics.native import address, library
from .batch import plain
from .projection import Subspace

_DTYPES = (torch.float32, torch.bfloat16)
_LEAST_ELEMENTS = 1 << 15
"""Of a thread: fewer take less time than waking it."""
_RULES = {"none": 0, "sgd": 1, "sign": 2}
_SOURCE = Path(numerics.__file__).with_name("subspace.cpp")
_NUMBERS = ("decay", "beta1", "fresh1", "beta2", "fresh2", "step_size", "first", "root", "eps", "rest", "sign")


class _Settings(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_float) for name in _NUMBERS), ("rule", ctypes.c_int32), ("adam", ctypes.c_int32))


def step_in_subspace(
    param: Tensor, grad: Tensor, part: Subspace | None, state: dict[str, Any], since: int, group: dict[str, Any],
    scales: tuple[float, float], active: str,
) -> bool:  # fmt: skip
    """Update a matrix [rows, columns] in place and return true; false, with nothing done, for what the pass cannot take.

    part: where the moments in `state` are; `None`: everywhere, or with no moments nowhere. since: steps that the moments
    have seen. scales: of the step in the part and outside it, beside lr.
    """
    own, given = plain(param), plain(grad)
    alike = own.shape == given.shape and own.dtype == given.dtype and own.dtype in _DTYPES
    if not (alike and own.is_contiguous() and given.is_contiguous() and own.numel()):
        return False
    side, rows, width, index, num_kept = _place(own, part, state)
    num_threads = max(1, min(torch.get_num_threads(), own.numel() // _LEAST_ELEMENTS))
    sizes = num_threads, own.dtype == torch.bfloat16, side, rows, width, index.numel()
    moments = [plain(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state]
    pointers = [address(index, torch.int32, index.numel()), own.data_ptr(), given.data_ptr()]
    pointers += [address(each, torch.float32, num_kept) for each in moments] + [0] * (2 - len(moments))
    settings = _settings(since, group, scales, active)
    _function()(*sizes, *pointers, ctypes.byref(settings))
    return True


def _place(own: Tensor, part: Subspace | None, state: dict[str, Any]) -> tuple[int, int, int, Tensor, int]:
    """Return how the moments lie: the kernel's side, rows, columns, the columns, slots or elements, and how many moments."""
    if part is None or "exp_avg" not in state:
        slot = 0 if "exp_avg" in state else -1
        return 0, 1, own.numel(), torch.tensor([slot], dtype=torch.int32), own.numel()
    rows, width, projector = own.shape[0] if own.ndim else 1, own[:1].numel(), state["projector"]
    kept = projector.numel()
    if part.side == 1:
        return 1, rows, width, projector, rows * kept
    if part.side is None:
        return 2, rows, width, projector, kept
    slots = torch.full((rows,), -1, dtype=torch.int32)
    slots[projector.long()] = torch.arange(kept, dtype=torch.int32)
    return 0, rows, width, slots, kept * width


def _settings(since: int, group: dict[str, Any], scales: tuple[float, float], active: str) -> _Settings:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return _Settings(
        1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, lr * scales[0], 1 / (1 - beta1**since),
        (1 - beta2**since) ** -0.5, group["eps"], lr * scales[1], -1.0 if group["maximize"] else 1.0,
        _RULES[group["inactive"]], active == "adam",
    )  # fmt: skip


@functools.cache
def _function() -> Any:
    try:
        function = library(_SOURCE).subspace_step
    except RuntimeError as error:
        raise UserError(f"{error}; or leave out fused=True") from error
    function.argtypes = [*[ctypes.c_int64] * 6, *[ctypes.c_void_p] * 5, ctypes.POINTER(_Settings)]
    function.restype = None
    return function
