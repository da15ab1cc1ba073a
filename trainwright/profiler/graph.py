"""Tries whether a model can be captured as a graph, hence planned; the profile itself needs no graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..artifacts import UserError
from ..capture.cached import cached_capture
from .step import DTYPES, LossFn

MAX_FORWARD_OPS = 2500
"""Forwards of more ATen calls than this are captured on request only: an export takes about 1.5 ms a call, a profile 0.1 ms."""


def try_capture(
    model: nn.Module, batch: Any, loss_fn: LossFn | None, autocast: str | None
) -> tuple[float | None, str | None]:
    """Return the seconds that the capture took and None; or None and the reason why it failed, in one line.

    >>> import torch
    >>> seconds, reason = try_capture(nn.Linear(2, 1), (torch.ones(3, 2),), lambda out, batch: out.mean(), None)
    >>> seconds > 0, reason
    (True, None)
    """
    try:
        found = cached_capture(model, batch, loss_fn, autocast=None if autocast is None else DTYPES[autocast])
    except UserError as error:
        return None, f"no graph, so this model can be profiled but not planned: {_one_line(error)}"
    return found.capture_s, None


def not_tried(num_ops: int) -> str:
    """Return the note of a profile for which no capture was tried."""
    return (
        f"whether the model can be captured, hence planned, was not tried: {num_ops} ops forward take longer to export "
        "than to profile; capture=True (--capture) tries"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
