"""One whole training step of a module, as every contender takes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def stepper(module: nn.Module, part: dict[str, Any], under: Callable[[], Any] = nullcontext) -> Callable[[], object]:
    """Return a step of `module` on `part`: forward, backward, fused AdamW; `under` is a context for the first two."""
    # Fused updates refuse to mix plain tensors and DTensors: tensor parallelism by hand leaves norms plain.
    kinds = [[p for p in module.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": params} for params in kinds if params], lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with under():
            loss = module(**part).loss
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
