"""Saving and resuming on real ranks, called by `tests/test_checkpoint*.py`; the process group is initialised."""

from __future__ import annotations

import copy
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import trainwright as tw
from trainwright import optim
from trainwright.artifacts import Plan
from trainwright.models import zoo
from trainwright.runtime import Checkpointer, storage, train_step, weights
from trainwright.runtime.checkpoint import checkpoint

LR = 1e-2


class Run:
    """A training run on this rank: steps on batches that differ, a schedule, and dropout where the model has some."""

    def __init__(self, plan: str, name: str, optimizer: str = "adamw", **options: Any) -> None:
        self.plan = Plan.parse(plan)
        model, self.batch = zoo.build(name, device="cpu", dtype="fp64", **options)
        self.module = tw.parallelize(model, self.plan, seed=7)
        self.optimizer = optim.create(optimizer, self.module.parameters(), lr=LR)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], gamma=0.3)

    def checkpointer(self, folder: str | Path, **options: Any) -> Checkpointer:
        return Checkpointer(folder, self.module, self.optimizer, scheduler=self.scheduler, **options)

    def steps(self, first: int, stop: int) -> list[float]:
        """Train on the batch with its rows shifted by the step, and a random number that weighs in."""
        losses = []
        for step in range(first, stop):
            batch = {k: v.roll(step, 0) if isinstance(v, torch.Tensor) else v for k, v in self.batch.items()}
            part = self.plan.shard_batch(batch)
            losses.append(
                float(train_step(self.module, self.optimizer, part)) + float(torch.rand(())) + random.random()
            )
            self.scheduler.step()
        return losses

    def whole(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state, gathered, in the user's shapes."""
        found = {f"model.{name}": value for name, value in tw.full_state_dict(self.module).items()}
        shapes = {name: self.module.extents[name].shape for name, _ in self.module.named_parameters()}
        for name, param in self.module.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                held = (value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)).clone()
                shaped = held.numel() == param.numel() and held.dim() > 0
                found[f"{name}.{key}"] = held.reshape(shapes[name]) if shaped else held
        return found


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    assert len(one) > 10
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one if one[key].numel())


def resumed_beside_uninterrupted(
    plan: str, name: str, folder: str, optimizer: str, asynchronous: bool
) -> dict[str, Any]:
    """Save after two steps and go on; then resume in a fresh run: the difference of the losses, weights and states."""
    torch.manual_seed(11 + dist.get_rank())
    random.seed(11 + dist.get_rank())
    run = Run(plan, name, optimizer)
    run.steps(0, 2)
    with run.checkpointer(folder, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(1)
        losses = run.steps(2, 5)  # while the copy is written
    fresh = Run(plan, name, optimizer)
    restored = fresh.checkpointer(folder).load_latest()
    again = fresh.steps(2, 5)
    return {
        "step": restored,
        "losses": max(abs(a - b) for a, b in zip(losses, again)),
        "state": difference(run.whole(), fresh.whole()),
        "lr": [group["lr"] for group in fresh.optimizer.param_groups] == [g["lr"] for g in run.optimizer.param_groups],
    }


def saves(plan: str, name: str, folder: str, optimizer: str = "adamw") -> list[float]:
    """Train two steps, save, and leave the whole state and what comes after in a file."""
    run = Run(plan, name, optimizer, **DROPOUT_OFF[name])
    run.steps(0, 2)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.save(1)
    after_two = run.whole()
    run.steps(2, 4)
    after_four = run.whole()
    if dist.get_rank() == 0:
        torch.save([after_two, after_four], Path(folder) / "reference.pt")
    dist.barrier()
    return []


DROPOUT_OFF: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama-tiny": {},
    "resnet-tiny": {},
}


def resumes_what_others_saved(plan: str, name: str, folder: str, optimizer: str = "adamw") -> list[float]:
    """The difference to the run that saved: at once, and two steps later (another order of sums)."""
    run = Run(plan, name, optimizer, **DROPOUT_OFF[name])
    assert run.checkpointer(folder).load_latest() == 1
    after_two, after_four = torch.load(Path(folder) / "reference.pt")
    at_once = difference(after_two, run.whole())
    run.steps(2, 4)
    return [at_once, difference(after_four, run.whole())]


def saves_every_step(plan: str, name: str, folder: str, keep: int, num_steps: int = 5) -> list[str]:
    run = Run(plan, name)
    with run.checkpointer(folder, keep=keep) as checkpointer:
        for step in range(num_steps):
            run.steps(step, step + 1)
            checkpointer.save(step)
    return sorted(path.name for path in Path(folder).iterdir())


def dies_while_writing(plan: str, name: str, folder: str, moment: str) -> None:
    """Save once; in the second save the last rank (for tensors) or the first one (it alone does the rest) is killed."""
    run = Run(plan, name)
    checkpointer = run.checkpointer(folder)
    run.steps(0, 1)
    checkpointer.save(0)
    checkpointer.wait()
    victim = dist.get_world_size() - 1 if moment == "tensors" else 0
    if dist.get_rank() == victim:
        module, function = {
            "tensors": (checkpoint, "write_pieces"),
            "texts": (checkpoint, "_write_durably"),
            "rename": (checkpoint, "_replace"),
        }[moment]
        setattr(module, function, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run.steps(1, 2)
    checkpointer.save(1)
    checkpointer.wait()
    raise AssertionError("a rank was to be killed")


def dies_while_removing(plan: str, name: str, folder: str) -> None:
    """Save twice and keep one; the first rank is killed when the older one is half gone."""
    run = Run(plan, name)
    checkpointer = run.checkpointer(folder, keep=1)
    run.steps(0, 1)
    checkpointer.save(0)
    checkpointer.wait()
    remove = shutil.rmtree

    def half(path: Path, *args: Any, **options: Any) -> None:
        if "00000000" not in str(path):
            return remove(path, *args, **options)
        (path / "position.json").unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = half  # type: ignore[assignment]
    run.steps(1, 2)
    checkpointer.save(1)
    checkpointer.wait()
    dist.barrier()
    raise AssertionError("a rank was to be killed")


def loads(plan: str, name: str, folder: str) -> dict[str, Any]:
    run = Run(plan, name)
    step = run.checkpointer(folder).load_latest()
    return {"step": step, "losses": run.steps(2, 3), "left": sorted(path.name for path in Path(folder).iterdir())}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let every file that grows beyond fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def saves_to_a_full_disk(plan: str, name: str, folder: str) -> dict[str, Any]:
    """What the second save says, and what is left."""
    run = Run(plan, name)
    checkpointer = run.checkpointer(folder)
    checkpointer.save(0)
    checkpointer.wait()
    said = ""
    with files_of_at_most(4096 if dist.get_rank() == dist.get_world_size() - 1 else 2**30):
        checkpointer.save(1)
        try:
            checkpointer.wait()
        except tw.UserError as error:
            said = str(error)
    dist.barrier()
    return {"said": said, "left": sorted(path.name for path in Path(folder).iterdir())}


def says_what_is_over(plan: str, name: str, folder: str, budget: int | None, asynchronous: bool) -> dict[str, Any]:
    """What is said of a first and a second save under a budget, and the bytes that this rank saves."""
    parsed = Plan.parse(plan).model_copy(update={"budget_bytes": budget})
    run, said = Run(parsed.to_json(), name), []
    run.steps(0, 1)
    with run.checkpointer(folder, asynchronous=asynchronous, say=said.append) as checkpointer:
        checkpointer.save(0)
        checkpointer.save(1)
    state = [value for held in run.optimizer.state.values() for value in held.values()]
    held = [*run.module.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
    return {"said": said, "bytes": sum(tensor.numel() * tensor.element_size() for tensor in local)}


def saves_under(plan: str, name: str, folder: str) -> None:
    Run(plan, name).checkpointer(folder).save(0)


def state_of_another_kind(plan: str, folder: str) -> None:
    """Save with one optimizer and load with another."""
    run = Run(plan, "llama-tiny")
    run.steps(0, 1)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.save(0)
    Run(plan, "llama-tiny", "sgd").checkpointer(folder).load_latest()


def another_models(plan: str, other: str, folder: str) -> None:
    with Run(plan, "llama-tiny").checkpointer(folder) as checkpointer:
        checkpointer.save(0)
    Run(other, "gpt2-tiny").checkpointer(folder).load_latest()


def weights_from_files(plan: str, name: str, folder: str, kind: str) -> dict[str, float]:
    """Read a model's weights from files under a plan; the largest difference, and how much of them this rank read."""
    parsed = Plan.parse(plan)
    model, _ = zoo.build(name, device="cpu", dtype="fp64")
    path = Path(folder) / kind
    if kind == "safetensors":
        from safetensors.torch import save_file

        if dist.get_rank() == 0:
            path.mkdir()
            tensors = {key: value.contiguous() for key, value in model.named_parameters()}
            names = sorted(tensors)
            save_file({key: tensors[key] for key in names[::2]}, path / "model-00001-of-00002.safetensors")
            save_file({key: tensors[key] for key in names[1::2]}, path / "model-00002-of-00002.safetensors")
        dist.barrier()
    else:
        source = tw.parallelize(copy.deepcopy(model), parsed, seed=0)
        with Checkpointer(path, source, torch.optim.SGD(source.parameters())) as checkpointer:
            checkpointer.save(0)
    num_read = _count_entries(weights._SafetensorsFiles if kind == "safetensors" else storage.StoredTensors)
    module = tw.parallelize(zoo.build(name, device="meta", dtype="fp64")[0], parsed, weights=path, seed=0)
    found = tw.full_state_dict(module)
    worst = max(float((found[key] - value).abs().max()) for key, value in model.named_parameters())
    return {"worst": worst, "share": num_read() / sum(param.numel() for param in model.parameters())}


def _count_entries(kind: type) -> Any:
    """Count the entries that the reader hands out from here on."""
    read, counts = kind.read, []

    def counted(self: Any, name: str, extent: Any) -> torch.Tensor:
        counts.append(part := read(self, name, extent))
        return part

    kind.read = counted  # type: ignore[attr-defined]

    def total() -> int:
        kind.read = read  # type: ignore[attr-defined]
        return sum(part.numel() for part in counts)

    return total
