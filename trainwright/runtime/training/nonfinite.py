"""Applies the policy for steps whose loss or gradients are not finite; no policy lets them change the weights."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...artifacts import Refusal, UserError
from ..module import ParallelModule

POLICIES = ("stop", "skip", "raise")
MOST_IN_A_ROW = 10


class NotFinite(Refusal):
    """Raised before an update whose loss or gradients are not finite; the weights are those of the previous step.

    With a tier in the host's memory and updates during the backward it is raised after them (`Tier.can_take_back`).
    """


class FiniteGate:
    """Checks before each update that loss and gradients are finite on every rank of the replica.

    stop: raise `NotFinite`. skip: leave the update out and continue, at most `MOST_IN_A_ROW` times in a row. raise: raise
    `FloatingPointError`, which names the gradients: a failure, after which a launcher may restart the run.
    It reads each gradient once, and adds an all-reduce of one number to a step.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise UserError(f"on_nan must be stop, skip or raise; got {policy!r}; choose one of these")
        self.policy = policy
        self.num_skipped = 0
        self._in_a_row = 0

    def lets_pass(self, module: ParallelModule, step: int, loss: Tensor) -> bool:
        """Return whether the update of `step` may be made, or raise as the policy says; a collective call."""
        if _all_finite(module, loss):
            self._in_a_row = 0
            return True
        value = float(loss.detach())
        what = f"the loss is {value}" if not math.isfinite(value) else "a gradient is not finite"
        if self.policy == "raise":
            raise FloatingPointError(
                f"{what} at step {step}; not finite: {', '.join(_culprits(module)) or 'the loss alone'}"
            )
        self.num_skipped, self._in_a_row = self.num_skipped + 1, self._in_a_row + 1
        if self.policy == "skip" and self._in_a_row <= MOST_IN_A_ROW:
            return False
        often = f" for {self._in_a_row} steps in a row" if self.policy == "skip" else ""
        weights = "the weights are those of the step before"
        if module.tier is not None and not module.tier.can_take_back:
            weights = "weights in the host's memory have been updated by it; go on from a checkpoint of a step before"
        raise NotFinite(
            f"{what} at step {step}{often}; {weights}; lower the learning rate, clip gradients, or train in a wider dtype"
        )


def check_policy(policy: str) -> None:
    """Raise `UserError` unless `policy` is one of `POLICIES`."""
    if policy not in POLICIES:
        raise UserError(f"on_nan must be stop, skip or raise; got {policy!r}; choose one of these")


def _all_finite(module: ParallelModule, loss: Tensor) -> bool:
    # The extremes are finite only if every entry is. They take two numbers, where `isfinite` takes a byte an entry and a
    # norm of bf16 a copy in fp32; and unlike a norm they do not overflow in fp16.
    grads = [grad for grad in _gradients(module).values() if grad.numel()]
    extremes = [extreme.double().abs() for grad in grads for extreme in torch.aminmax(_real(grad))]
    total = loss.detach().double().abs() + sum(extremes, torch.zeros((), dtype=torch.float64, device=loss.device))
    if module.tier is not None:  # the gradients have gone to it
        total = total + module.tier.extremes()
    finite = torch.isfinite(total).to("cpu", torch.int32)
    if module.replicas.size > 1:
        with module.communicator.activity.waiting("the exchange of what is finite"):
            dist.all_reduce(finite, dist.ReduceOp.MIN, group=module.replicas.inside)
    return bool(finite.item())


def _gradients(module: ParallelModule) -> dict[str, Tensor]:
    """Return this rank's part of every gradient, by name; none with a tier, which has taken them."""
    if module.tier is not None:
        return {}
    grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    return {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def _real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _culprits(module: ParallelModule) -> list[str]:
    """Return the names of the parameters whose gradients are not finite on any rank; a collective call."""
    own = [name for name, grad in _gradients(module).items() if not bool(torch.isfinite(grad).all())]
    found: list[list[str]] = [[] for _ in range(module.replicas.size)]
    dist.all_gather_object(found, own, group=module.replicas.inside)
    return list(dict.fromkeys(name for names in found for name in names))
