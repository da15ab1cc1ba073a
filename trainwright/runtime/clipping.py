"""Clips the gradients of a planned model by their norm over all ranks and pipeline stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..artifacts import UserError
from .module import ParallelModule


def clip_grad_norm_(module: ParallelModule, max_norm: float) -> Tensor:
    """Scale all gradients of `module` in place so that their norm is at most `max_norm`; return their norm before.

        norm = √(Σ_p ‖g_p‖²),    g ← g · min(1, max_norm / (norm + 1e-6))

    over all parameters p of the model, each counted once: those of every stage of a plan with pipeline stages, of which
    `torch.nn.utils.clip_grad_norm_` sees one alone, and a tied one on the first stage that has it. A collective call, after
    `backward()`. Without stages torch's own does the same. Raises `UserError` for a norm that is not positive.

    >>> import trainwright as tw
    >>> net, batch = torch.nn.Linear(2, 1, bias=False), (torch.tensor([[3.0, 4.0]]),)
    >>> plan = tw.plan(net, batch, loss_fn=lambda output: output.sum(), hardware="cpu:1")
    >>> module = tw.parallelize(net, plan, loss_fn=lambda output: output.sum())
    >>> module(*batch).loss.backward()
    >>> tw.runtime.clip_grad_norm_(module, 1.0)
    tensor(5.)
    """
    if not max_norm > 0:
        raise UserError(f"a norm above 0 is needed to clip by; got {max_norm!r}; try 1.0")
    if module.tier is not None:
        raise UserError(
            "all gradients at once are needed to clip by their norm; with a tier each is gone when its parameter is updated; take "
            "TierOptions(clip_previous_norm=…), which clips by the norm of the step before"
        )
    with torch.no_grad():
        grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
        norm = _norm(module, grads)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads.values():
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(factor.to(local.device, local.dtype))
    return norm


def _norm(module: ParallelModule, grads: dict[str, Tensor]) -> Tensor:
    """Return the norm of all gradients: squares are summed over the ranks of a stage first, then over stages."""
    pipe = module.pipe
    counted = [grad for name, grad in grads.items() if pipe is None or pipe.owns(name)]
    norms = [torch.linalg.vector_norm(grad) for grad in counted]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    dtype = next((grad.dtype for grad in grads.values()), torch.float32)
    exact = torch.float64 if module.device.type == "cpu" else torch.float32
    total = sum((norm.to(exact) ** 2 for norm in whole), torch.zeros((), dtype=exact, device=module.device))
    if pipe is not None:
        with module.communicator.activity.awaiting("the norm of all stages' gradients"):
            dist.all_reduce(total, group=pipe.group)
    return total.sqrt().to(dtype)
