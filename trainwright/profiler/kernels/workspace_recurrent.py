"""Estimates what oneDNN's LSTM layer saves for its backward, and its workspace in one call on a CPU.

The workspace is copies of the weights and the gates of all steps; in the backward, copies of the incoming gradients too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .workspace_native import num_bytes


def lstm_kept_bytes(x: Tensor, hidden: int) -> int:
    """Return the bytes that oneDNN saves for x [s, b, i]: gates, states and their gradients, each in whole pages."""
    num_steps, batch, inputs = x.shape
    size = x.element_size()
    gates = num_steps * batch * _leading(4 * hidden, size) * size
    wide = 2 * (num_steps + 1) * batch * _leading(max(inputs, hidden), size) * size
    narrow = 2 * (num_steps + 1) * batch * _leading(hidden, size) * size
    return _pages(gates) + 3 * _pages(wide) + 2 * _pages(narrow) + _pages(num_steps * batch * hidden * size)


def _leading(columns: int, size: int) -> int:
    """Return oneDNN's row length: padded to whole cache lines, and past multiples of 256 elements, which share cache sets."""
    line = 64 // size
    padded = -(-columns // line) * line
    return padded + line if padded % 256 == 0 else padded


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def lstm_bytes(args: tuple[Any, ...], out: Any) -> int:
    x, *weights = args[:5]
    return sum(num_bytes(weight) for weight in weights[:3]) + _lstm_gates(x, weights[1])


def lstm_backward_bytes(args: tuple[Any, ...], out: Any) -> int:
    x, *weights = args[:5]
    states = 2 * x.shape[1] * weights[1].shape[1] * x.element_size()
    return lstm_bytes(args, out) + x.shape[0] * states // 2 + states


def _lstm_gates(x: Tensor, weight: Tensor) -> int:
    """Return the bytes of the gates of all steps and of a few states; weight [4 hidden, hidden]."""
    return (x.shape[0] + 1) * x.shape[1] * weight.shape[0] * x.element_size()
