"""Training with optimizer states on a disk, on real ranks, called by `tests/rank/test_offload_states.py`."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from tests.checkpoint_cases import difference
from trainwright import optim
from trainwright.artifacts import Plan, UserError
from trainwright.models import zoo
from trainwright.profiler.kernels.allocator import measure, static_bytes
from trainwright.runtime import Checkpointer, train_step

LR = 1e-2


class Run:
    """A training run on this rank, on rows that are shifted by the step."""

    def __init__(self, plan: str, name: str, optimizer: str) -> None:
        self.plan = Plan.parse(plan)
        model, self.batch = zoo.build(name, device="cpu")
        self.module = tw.parallelize(model, self.plan, seed=3)
        self.optimizer = optim.create(optimizer, self.module.parameters(), lr=LR)
        self.static_bytes = static_bytes(self.module)
        self.parts = [self.plan.shard_batch(self._rolled(number)) for number in range(4)]

    def _rolled(self, number: int) -> dict[str, Any]:
        return {k: v.roll(number, 0) if isinstance(v, torch.Tensor) else v for k, v in self.batch.items()}

    def step(self, number: int) -> None:
        train_step(self.module, self.optimizer, self.parts[number])

    def steps(self, first: int, stop: int) -> Run:
        for number in range(first, stop):
            self.step(number)
        return self

    def whole(self) -> dict[str, torch.Tensor]:
        """Every parameter and every state, as `state_dict` has them, gathered."""
        found = {f"model.{name}": value for name, value in tw.full_state_dict(self.module).items()}
        names = [name for name, _ in self.module.named_parameters()]
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                found[f"{names[index]}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        return found


def without(plan: str) -> str:
    """The same plan with all states on the device."""
    found = Plan.parse(plan)
    params = {key: entry.model_copy(update={"offloaded": {}}) for key, entry in found.params.items()}
    return found.model_copy(update={"params": params}).to_json()


def beside_states_on_the_device(plan: str, name: str, optimizer: str) -> dict[str, Any]:
    """Train three steps with the plan, and with its states on the device: the difference, and what the plan's held."""
    away, numbers = Run(plan, name, optimizer), itertools.count()
    with away.module.communicator.settling():
        record = measure(lambda: away.step(next(numbers)), num_steps=2)
    away.step(2)
    kept = Run(without(plan), name, optimizer).steps(0, 3)
    held = sum(
        value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes
        for state in away.optimizer.state.values()
        for value in state.values()
    )
    return {
        "difference": difference(away.whole(), kept.whole()),
        "num_compared": len(away.whole()),
        "held_bytes": held,
        "peak_bytes": away.static_bytes + record.peak_delta_bytes,
    }


def goes_on_under_the_other_plan(plan: str, name: str, folder: str, optimizer: str) -> dict[str, float]:
    """Save after two steps with states off the device, and with states on it; resume each under the other plan."""
    found = {}
    plans = {"away": plan, "kept": without(plan)}
    for saved, resumed in (("away", "kept"), ("kept", "away"), ("away", "away")):
        place = str(Path(folder) / f"{saved}-{resumed}")
        run = Run(plans[saved], name, optimizer).steps(0, 2)
        with Checkpointer(place, run.module, run.optimizer) as checkpointer:
            checkpointer.save(1)
        run.steps(2, 4)
        fresh = Run(plans[resumed], name, optimizer)
        assert Checkpointer(place, fresh.module, fresh.optimizer).load_latest() == 1
        found[f"{saved} to {resumed}"] = difference(fresh.steps(2, 4).whole(), run.whole())
    return found


def loads_its_own_state_dict(plan: str, name: str, optimizer: str) -> list[float]:
    """Put back by `load_state_dict` what `state_dict` returned, into the optimizer that stepped and into a fresh one."""
    run = Run(plan, name, optimizer).steps(0, 2)
    weights = {key: value.detach().clone() for key, value in run.module.named_parameters()}
    saved = copy.deepcopy(run.optimizer.state_dict())
    expected = run.steps(2, 4).whole()
    differences = []
    for fresh in (False, True):
        with torch.no_grad():
            for key, value in run.module.named_parameters():
                value.copy_(weights[key])
        run.module.num_steps = 2  # of dropout
        if fresh:
            run.optimizer = optim.create(optimizer, run.module.parameters(), lr=LR)
        run.optimizer.load_state_dict(copy.deepcopy(saved))
        differences.append(difference(run.steps(2, 4).whole(), expected))
    return differences


def full_disk(plan: str, name: str, room_bytes: int, folder: str) -> str:
    """What a run says whose disk is full, and what it leaves behind in `folder`."""
    import resource
    import tempfile

    tempfile.tempdir = folder  # others write to the usual one
    run = Run(plan, name, "adamw")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
    try:
        run.step(0)
    except UserError as error:
        said = str(error)
    else:
        said = "nothing"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        tempfile.tempdir = None
    dist.barrier()
    left = os.listdir(folder)
    return said if not left else f"{said}; left {left}"


def peak_of_deep(plan: str) -> int:
    """The peak of two steps of a model that is little but parameters."""
    found = Plan.parse(plan)
    model = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.Linear(200, 64), torch.nn.Linear(64, 16))
    module = tw.parallelize(model, found, loss_fn=lambda out, _: out.square().mean(), seed=0)
    optimizer, batch = torch.optim.AdamW(module.parameters(), foreach=False), (torch.ones(2, 64),)
    with module.communicator.settling():
        record = measure(lambda: train_step(module, optimizer, batch), num_steps=2)
    return static_bytes(module) + record.peak_delta_bytes
