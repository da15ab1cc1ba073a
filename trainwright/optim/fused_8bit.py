"""The updates of 8-bit Adam and momentum as one pass over memory, in C++ on the CPU (`numerics/blockwise.cpp`)."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import numerics
from ..artifacts import UserError
from ..numerics.native import address, library
from ..numerics.quantise import dynamic_codebook, num_blocks
from .batch import Lists
from .compiled import Update, flat_views, taking_any

_NUM_DECADES = 7
_COLUMNS, _OCTAVES, _FRACTION_BITS = 16, 32, 23
_LEAST_ELEMENTS = 1 << 15
"""Of a thread: fewer take less time than waking it."""
_DTYPES = (torch.float32, torch.bfloat16)
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_SOURCE = Path(numerics.__file__).with_name("blockwise.cpp")


_SETTINGS = ("decay", "beta1", "fresh1", "beta2", "fresh2", "step_size", "root", "eps", "sign")


class _Settings(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in _SETTINGS)


def fused(update: Update) -> Update:
    """Return the one-pass form of an 8-bit `update`; what it cannot take (fp64, fp16, gaps) goes to `update`."""
    _load()
    general = taking_any(update)

    def run(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        (param,), (grad,) = params, grads
        names = [name for name in _MOMENTS if name in states]
        moments = [states[name][0] for name in names]
        scales = [states[f"{name}_absmax"][0] for name in names if f"{name}_absmax" in states]
        in_order = _in_order([param, grad, *moments])
        if not in_order or param.dtype not in _DTYPES or grad.dtype != param.dtype:
            return general(params, grads, states, step, lr, options)
        num_elements, settings = param.numel(), ctypes.byref(_settings(step, lr, options))
        sizes = [max(1, min(torch.get_num_threads(), num_elements // _LEAST_ELEMENTS)), num_elements]
        narrow = param.dtype == torch.bfloat16
        pointers = [param.data_ptr(), grad.data_ptr()]
        if scales:
            block_size = options["block_size"]
            for codes, scale in zip(moments, scales):
                pointers.append(address(codes, torch.uint8, num_elements))
                pointers.append(address(scale, torch.float32, num_blocks(num_elements, block_size)))
            _call("blocks", len(moments))(*sizes, block_size, narrow, *pointers, _tables().data_ptr(), settings)
        else:
            pointers += [address(moment, torch.float32, num_elements) for moment in moments]
            _call("wide", len(moments))(*sizes, narrow, *pointers, settings)
        return None

    return run


def _in_order(tensors: list[Tensor]) -> bool:
    """Return whether the tensors' elements fill their memory, all in the same order."""
    return all(tensor.is_contiguous() for tensor in tensors) or flat_views(tensors) is not None


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
def _call(kind: str, num_moments: int) -> Any:
    """Return the pass over `blocks` of codes with their scales and tables, or over `wide` moments."""
    function = getattr(_load(), f"{'adam' if num_moments == 2 else 'momentum'}_{kind}")
    sizes, pointers = (4, 3 + 2 * num_moments) if kind == "blocks" else (3, 2 + num_moments)
    function.argtypes = [*[ctypes.c_int64] * sizes, *[ctypes.c_void_p] * pointers, ctypes.POINTER(_Settings)]
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
    """Return what the pass reads and writes codes by, of the signed and the unsigned map, as `Tables` in C++ has it."""
    return torch.cat([_map(signed) for signed in (True, False)]).contiguous()


def _map(signed: bool) -> Tensor:
    """Return the bytes of a map's values, their planes, gains, thresholds, counts and borrows.

    Decade i has 2^k intervals from 10^(i-7) to 10^(i-6); its threshold is halfway between the neighbours on its two
    sides. Below the first decade is the value 0, and above the last the value 1.
    """
    powers = [i + (not signed) for i in range(_NUM_DECADES)]
    values, thresholds = dynamic_codebook(signed).values, _thresholds(powers)
    counts = [30 + signed, *(23 - k if k else 30 for k in powers), 22 - powers[-1]]
    gains = torch.zeros(_COLUMNS)
    for i, k in enumerate(powers):
        gains[(23 - k) % _COLUMNS] = 4 / 0.9 / 10.0 ** (i - _NUM_DECADES + 1) if k else 0.0
    gains[counts[-1] % _COLUMNS] = -math.inf
    parts = [values, gains, _padded(thresholds), _padded(torch.tensor(counts, dtype=torch.int32))]
    bytes_ = [part.view(torch.uint8) for part in (*parts, _borrows(thresholds, counts, signed))]
    return torch.cat([bytes_[0], bytes_[0].view(-1, 4).T.reshape(-1), *bytes_[1:]])


def _padded(row: Tensor) -> Tensor:
    return torch.cat([row, row.new_zeros(_COLUMNS - len(row))])


def _thresholds(powers: list[int]) -> Tensor:
    units = [10.0 ** (i - _NUM_DECADES + 1) for i in range(_NUM_DECADES)]
    inner = [unit * (0.1 + 0.18 / 2**k) for unit, k in zip(units[1:], powers[1:])]
    return torch.tensor([units[0] * (0.1 + 0.45 / 2 ** powers[0]) / 2, *inner, 1 - 0.225 / 2 ** powers[-1]])


def _borrows(thresholds: Tensor, counts: list[int], signed: bool) -> Tensor:
    """For the octaves below 2, by the last five bits of their exponent, what a magnitude's bits are subtracted from.

    The difference, in units of exponents, is the count below the octave's threshold, and one less above it.
    """
    found, book = [0] * _OCTAVES, dynamic_codebook(signed)
    for exponent in range(128 - _OCTAVES, 128):
        bits = torch.tensor([exponent << _FRACTION_BITS, (exponent + 1 << _FRACTION_BITS) - 1], dtype=torch.int32)
        ends = bits.view(torch.float32)
        below, above = ((thresholds < end).sum().item() for end in ends)
        places = (book.nearest(ends).int() - (127 if signed else -1)).tolist()
        count = counts[below] if places[1] > 2 else 31 - places[0]
        edge = thresholds[below].view(torch.int32).item() if above > below else -1
        found[exponent % _OCTAVES] = (count + exponent << _FRACTION_BITS) + edge % (1 << _FRACTION_BITS)
    return torch.tensor(found).to(torch.int32)
