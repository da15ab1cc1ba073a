"""The updates of 8-bit Adam and momentum as one pass over memory, in C++ on the CPU (`numerics/blockwise.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import numerics
from ..artifacts import UserError
from ..numerics.native import library
from .batch import Lists
from .compiled import Update, flat_views, taking_any

_NUM_DECADES = 7
_LEAST_ELEMENTS = 1 << 15
"""Of a thread: fewer take less time than waking it."""
_DTYPES = (torch.float32, torch.bfloat16)
_SOURCE = Path(numerics.__file__).with_name("blockwise.cpp")


_SETTINGS = ("decay", "beta1", "fresh1", "beta2", "fresh2", "step_size", "root", "eps", "sign")


class _Settings(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in _SETTINGS)


def fused(update: Update) -> Update:
    """Return the one-pass form of an 8-bit `update`; what it cannot take (fp64, wide moments, gaps) goes to `update`."""
    _load()
    general = taking_any(update)

    def run(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        (param,), (grad,) = params, grads
        moments = [name for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in states]
        views = flat_views([param, grad, *(states[name][0] for name in moments)])
        scales = [states[f"{name}_absmax"][0] for name in moments if f"{name}_absmax" in states]
        if views is None or not scales or param.dtype not in _DTYPES or grad.dtype != param.dtype:
            return general(params, grads, states, step, lr, options)
        codes = [tensor for pair in zip(views[2:], scales) for tensor in pair]
        settings = _settings(step, lr, options)
        num_threads = max(1, min(torch.get_num_threads(), param.numel() // _LEAST_ELEMENTS))
        pointers = [tensor.data_ptr() for tensor in (views[0], views[1], *codes, _tables())]
        sizes = num_threads, param.numel(), options["block_size"], param.dtype == torch.bfloat16
        _call(len(moments))(*sizes, *pointers, ctypes.byref(settings))
        return None

    return run


def check_on_cpu(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UserError` where a form that is C++ is to step parameters elsewhere."""
    for group in optimizer.param_groups:
        for param in group["params"] if group["fused"] else ():
            if param.grad is not None and param.device.type != "cpu":
                raise UserError(
                    f"{type(optimizer).__name__}'s fused form is a kernel for CPUs; got a parameter on {param.device}; "
                    f"take its form {type(optimizer).forms[1]} there"  # type: ignore[attr-defined]
                )


@functools.cache
def _load() -> ctypes.CDLL:
    try:
        return library(_SOURCE)
    except RuntimeError as error:
        raise UserError(f"{error}; or leave out fused=True") from error


@functools.cache
def _call(num_moments: int) -> Any:
    function = _load().adam_blocks if num_moments == 2 else _load().momentum_blocks
    function.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_void_p] * (3 + 2 * num_moments), ctypes.POINTER(_Settings)]
    function.restype = None
    return function


def _settings(step: Any, lr: Any, options: dict[str, Any]) -> _Settings:
    step, lr, sign = float(step), float(lr), -1.0 if options["maximize"] else 1.0
    if "betas" not in options:
        return _Settings(decay=options["weight_decay"], beta1=options["momentum"], step_size=lr, sign=sign)
    beta1, beta2 = options["betas"]
    decay, root = 1 - lr * options["weight_decay"], (1 - beta2**step) ** -0.5
    return _Settings(decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step), root, options["eps"], sign)


@functools.cache
def _tables() -> Tensor:
    """Return the dynamic map's arithmetic, [signed, unsigned] × [slope, offset, gain, shift, last, threshold] × decade."""
    return torch.tensor([_map(signed) for signed in (True, False)], dtype=torch.float32).contiguous()


def _map(signed: bool) -> list[list[float]]:
    """Constants of each decade, between those of the value 0 and those of the value 1.

    Decade i has n intervals from 10^(i-7) to 10^(i-6); a threshold is halfway between the neighbours on its two sides.
    """
    zero = -1 if signed else 0
    columns = [[0.0, 0.0, 0.0, zero, zero, 0.0]]
    for i in range(_NUM_DECADES):
        n, unit = 2 ** (i if signed else i + 1), 10.0 ** (i - _NUM_DECADES + 1)
        threshold = unit * (0.1 + 0.18 / n) if i else unit * (0.1 + 0.45 / n) / 2
        columns.append([0.9 * unit / n, -0.8 * unit, n / 0.9 / unit, n - n / 9 - 1, 2 * n - 2, threshold])
    columns.append([0.0, 1.0, 0.0, 2 * n - 1, 2 * n - 1, 1 - 0.225 / n])
    return [list(row) for row in zip(*columns)]
