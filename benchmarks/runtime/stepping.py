"""One whole training step of a module, as every contender takes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Step = Callable[[], object]


def stepper(module: nn.Module, part: dict[str, Any], under: Callable[[], Any] = nullcontext) -> Step:
    """Return a step of `module` on `part`: forward, backward, fused AdamW; `under` is a context for the first two."""
    return stepper_of(module, part, under)[0]


def stepper_of(
    module: nn.Module,
    part: dict[str, Any],
    under: Callable[[], Any] = nullcontext,
    called: Callable[..., Any] | None = None,
) -> tuple[Step, torch.optim.Optimizer]:
    """Return the step and its optimizer; `called` is what runs in the module's place, the module compiled for instance."""
    # Fused updates refuse to mix plain tensors and DTensors: tensor parallelism by hand leaves norms plain.
    kinds = [[p for p in module.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": params} for params in kinds if params], lr=1e-4, fused=True)
    run = module if called is None else called

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with under():
            output = run(**part)  # held while the backward runs, as a training script does
            loss = output.loss
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, optimizer
