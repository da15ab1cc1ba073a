"""Runs that go wrong, on real ranks, called by `tests/runtime/test_faults.py`; the process group is initialised."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainwright as tw
from trainwright.artifacts import Plan
from trainwright.cli.saving import SavePolicy, Saving
from trainwright.runtime import train_loop

NUM_STEPS = 5


def build() -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return model, (torch.randn(8, 6, dtype=torch.float64),), square


def square(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return output.square().mean()


def start(plan: str) -> tuple[Plan, Any, Any]:
    parsed = Plan.parse(plan)
    model, _, loss_fn = build()
    module = tw.parallelize(model, parsed, loss_fn=loss_fn, seed=0)
    return parsed, module, torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)


def batches(first: int, bad_step: int = -1, value: float = float("nan")) -> Iterator[tuple[Tensor]]:
    """A batch a step; that of `bad_step` has one entry that is not finite."""
    step = first
    while True:
        inputs = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if step == bad_step:
            inputs[1, 2] = value
        yield (inputs,)
        step += 1


def not_finite(plan: str, on_nan: str, folder: str, bad_step: int, value: float) -> dict[str, Any]:
    """Train past a bad batch: what was raised, the losses, and the weights at the end."""
    _, module, optimizer = start(plan)
    saving, losses, raised = Saving(SavePolicy(folder), module, optimizer, NUM_STEPS), [], ""
    try:
        with saving:
            train_loop(
                module,
                optimizer,
                batches(0, bad_step, value),
                steps=NUM_STEPS,
                on_nan=on_nan,
                on_step=lambda event: losses.append((event["step"], event["loss"], event["skipped"])),
                after_step=saving.after_step,
            )
    except (tw.Refusal, FloatingPointError) as error:
        raised = f"{type(error).__name__}: {error}"
    return {"raised": raised, "losses": losses, "weights": _weights(module)}


def without_the_step(plan: str, left_out: int, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """The same run where one batch is never seen."""
    _, module, optimizer = start(plan)
    seen = (batch for step, batch in zip(range(num_steps), batches(0)) if step != left_out)
    num_seen = num_steps - (0 <= left_out < num_steps)
    losses = train_loop(module, optimizer, seen, steps=num_seen)
    return {"losses": losses, "weights": _weights(module)}


def goes_on(plan: str, folder: str) -> dict[str, Any]:
    """Resume what stopped, with good data."""
    _, module, optimizer = start(plan)
    saving = Saving(SavePolicy(folder, resume=True), module, optimizer, NUM_STEPS)
    train_loop(module, optimizer, batches(saving.first_step), steps=NUM_STEPS, first_step=saving.first_step)
    return {"first": saving.first_step, "weights": _weights(module)}


def always_bad(plan: str) -> None:
    _, module, optimizer = start(plan)
    bad = ((torch.full((8, 6), float("inf"), dtype=torch.float64),) for _ in range(100))
    train_loop(module, optimizer, bad, steps=100, on_nan="skip")


def _weights(module: Any) -> list[float]:
    return torch.cat([value.flatten() for value in tw.full_state_dict(module).values()]).tolist()


def hangs(plan: str, where: str) -> None:
    """The last rank, or all of them, stop in the midst of step 2, in Python, in an op, or as a process."""
    _, module, optimizer = start(plan)
    last = dist.get_rank() == dist.get_world_size() - 1

    def data() -> Iterator[Any]:
        for step, batch in enumerate(batches(0)):
            if step == 2 and (where == "data of all" or (last and where == "data")):
                time.sleep(600)
            if last and step == 2 and where == "process":
                os.kill(os.getpid(), signal.SIGSTOP)
            yield batch

    if last and where == "backward":
        params = list(module.parameters())
        params[0].register_hook(lambda grad: time.sleep(600) if module.num_steps > 2 else grad)
    train_loop(module, optimizer, data(), steps=NUM_STEPS, timeout_s=3.0)
