"""What the tests of losses whose value comes late run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from trainwright.rank.late_loss import summing_the_loss
from trainwright.runtime.module import ParallelModule


def planned(model: str, **question: Any) -> tuple[ParallelModule, dict[str, Any]]:
    """The module of a zoo model's plan, in float64, and this rank's part of the batch."""
    torch.manual_seed(0)
    built, batch = tw.zoo.build(model, device="cpu", dtype="fp64")
    plan = tw.plan(built, batch, **question)
    return tw.parallelize(built, plan, seed=0), plan.shard_batch(batch)


def step(module: ParallelModule, part: dict[str, Any], late: bool, factor: float = 1.0) -> dict[str, Any]:
    """One forward and backward: the loss before the block ends, after it, and all gradients of this rank in one."""
    module.num_steps = 0  # the same dropout masks each time
    module.zero_grad()
    if late:
        with module.late_loss():
            loss = module(**part).loss
            inside = float(loss.detach())
            (factor * loss).backward()
    else:
        loss = module(**part).loss
        inside = float(loss.detach())
        (factor * loss).backward()
    grads = [param.grad.to_local().flatten() for param in module.parameters() if param.grad is not None]
    return {"inside": inside, "loss": float(loss.detach()), "gradients": torch.cat(grads)}


def compared(model: str, question: dict[str, Any], factor: float = 1.0) -> dict[str, Any]:
    """A step whose loss comes late beside one whose loss is waited for."""
    module, part = planned(model, **question)
    wanted, found = (step(module, part, late, factor) for late in (False, True))
    with torch.no_grad(), module.late_loss():
        evaluated = float(module(**part).loss)
    return {
        "sums": summing_the_loss(module.steps.planned.local) is not None,
        "same gradients": bool(torch.equal(wanted["gradients"], found["gradients"])),
        "loss": (wanted["loss"], found["loss"]),
        "inside": found["inside"],
        "finite": bool(found["gradients"].abs().sum() > 0),
        "evaluated": evaluated,
    }


def order(question: dict[str, Any]) -> list[str]:
    """What a rank does, in order: the loss's sum is waited for after the backward."""
    module, part = planned("gpt2-tiny", **question)
    events: list[str] = []
    issue = module.communicator._issue

    def noted(kind: str, axis: int, tensor: torch.Tensor, op: str = "sum") -> Any:
        what = "gradients" if tensor.dim() else "loss" if "issue count of labels" in events else "count of labels"
        events.append(f"issue {what}")
        collective = issue(kind, axis, tensor, op)
        wait = collective.wait

        def waited() -> torch.Tensor:
            events.append(f"wait {what}")
            return wait()

        collective.wait = waited
        return collective

    module.communicator._issue = noted
    with module.late_loss():
        loss = module(**part).loss
        events.append("forward ends")
        loss.backward()
        events.append("backward ends")
    return events


def failing(question: dict[str, Any]) -> bool:
    """An error inside the block comes out, and the next step waits for its loss as ever."""
    module, part = planned("gpt2-tiny", **question)
    try:
        with module.late_loss():
            module(**part)
            raise ArithmeticError
    except ArithmeticError:
        dist.barrier()
    values = [step(module, part, late)["loss"] for late in (False, True)]
    return values[0] == values[1] and module._late is None
