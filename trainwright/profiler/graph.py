"""Whether a model can be captured as a graph, hence planned; tried beside the profile, which needs no graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..artifacts import UserError
from ..capture.cached import cached_capture
from .step import DTYPES, LossFn

MAX_FORWARD_OPS = 2500
"""Forwards of more ATen calls are captured on request only: a call takes an export about 1.5 ms, the profile 0.1 ms."""


def try_capture(
    model: nn.Module, batch: Any, loss_fn: LossFn | None, autocast: str | None
) -> tuple[float | None, str | None]:
    """Return the seconds that a capture took, or None and what stands in the way, in a line.

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
    """Return the note of a profile without an attempt."""
    return (
        f"whether the model can be captured, hence planned, was not tried: {num_ops} ops forward take longer to export "
        "than to profile; capture=True (--capture) tries"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
