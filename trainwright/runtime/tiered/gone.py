"""A tensor that replaces a gradient that its update has taken: every read raises, where `None` would be passed over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...artifacts import UserError


class Gone(Tensor):
    """A gradient without contents. Every computation on it raises `UserError`: clipping by torch's own, a second backward.

    >>> param = torch.nn.Parameter(torch.ones(2, 3))
    >>> param.grad = gone_like(param)
    >>> torch.nn.utils.clip_grad_norm_([param], 1.0)
    Traceback (most recent call last):
    ...
    trainwright.artifacts.record.UserError: a gradient is needed by ...
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own says that it is disabled
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
        raise UserError(
            f"a gradient is needed by {name}; with a tier each goes to its update as soon as it is there, and is none until the "
            "optimizer's step; clip by TierOptions(clip_previous_norm=…), whose norm is that of the step before, and run one "
            "backward between two steps of the optimizer"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Gone({list(self.shape)})"


def gone_like(param: Tensor) -> Gone:
    """Return what stands for the gradient of `param`, in no memory of its own."""
    held = torch.zeros((), dtype=param.dtype, device=param.device)
    return held.expand(param.shape).as_subclass(Gone)
