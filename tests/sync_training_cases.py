"""`tw.train(…, sync=…)` on real ranks, beside the same method on whole models on the simulator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.training_cases import Squares
from trainwright import launch, sync
from trainwright.artifacts import Plan
from trainwright.sync import Steps, simulate
from trainwright.sync.signs import Segments

STEPS = 6
OPTIMIZERS = {"sgd": torch.optim.SGD, "sgd-momentum": torch.optim.SGD, "adamw": torch.optim.AdamW}
OPTIMIZER_OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.02},
    "sgd-momentum": {"lr": 0.02, "momentum": 0.9},
    "adamw": {"lr": 0.02},
}


def batches(num: int = 60) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 6, dtype=torch.float64, generator=generator),) for _ in range(num)]


def trained(plan: Plan, name: str, optimizer: str, options: dict[str, Any], **keywords: Any) -> Any:
    built = Squares.build()
    given = {key: value for key, value in OPTIMIZER_OPTIONS[optimizer].items() if key != "lr"}
    return tw.train(
        built["model"], plan, batches(), loss_fn=Squares.loss, optimizer=optimizer, optimizer_options=given,
        lr=OPTIMIZER_OPTIONS[optimizer]["lr"], sync=name, sync_options=options, **keywords,
    )  # fmt: skip


def of_whole_models(
    name: str, optimizer: str, options: dict[str, Any], num: int, cut: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """The weights that the method ends with on `num` whole models; cut: lengths of the shards, for a scale a shard."""

    def program() -> Steps[nn.Module]:
        model = Squares.build()["model"]
        joined = yield from sync.join(
            name, model, OPTIMIZERS[optimizer](model.parameters(), **OPTIMIZER_OPTIONS[optimizer]), **options
        )
        method = joined.method
        if cut:
            segments = Segments(cut, num)
            method.__class__ = type("OfShards", (type(method),), {"segments": segments})
            method.state["server_error"] = method.vector("m").new_zeros(segments.chunk_length)
        chunks, stream = getattr(method, "num_chunks", num), batches()
        for step in range(STEPS):
            dealt = stream[step * chunks : (step + 1) * chunks]
            own = dealt[min(method.worker.rank, chunks - 1)]
            if joined.record.takes == "closure":
                yield from joined.steps(_closure(model, dealt if hasattr(method, "num_chunks") else None, own))
                continue
            method.replica.optimizer.zero_grad()
            loss = Squares.loss(model(*own), own)
            loss.backward()
            yield from joined.steps(loss.detach(), 4)
        yield from joined.finishing()
        return model

    return dict(simulate([program() for _ in range(num)]).results[0].state_dict())


def _closure(model: nn.Module, dealt: list[Any] | None, own: Any) -> Any:
    def closure(index: int = 0) -> Tensor:
        batch = own if dealt is None else dealt[index]
        loss: Tensor = Squares.loss(model(*batch), batch)
        return loss if dealt is None else loss / len(dealt)

    return closure


def difference(module: Any, weights: dict[str, Tensor]) -> float:
    found = tw.full_state_dict(module)
    return max(float((found[key] - value).abs().max()) for key, value in weights.items())


def equals_whole_models(plan: str, methods: list[list[Any]], replicas: int, folder: str) -> dict[str, Any]:
    """On the ranks of a pool: the end of each method beside that on whole models; and of a run that was interrupted."""
    parsed, found = Plan.parse(plan), {}
    for name, optimizer, options, cut in methods:
        path, seen, again = Path(folder) / name, [], []
        run = {"steps": STEPS, "checkpoint": path, "replicas": replicas, "checkpoint_every": 4}
        whole = trained(parsed, name, optimizer, options, on_step=seen.append, **run)
        forget_the_last_step(path)
        rest = trained(parsed, name, optimizer, options, resume=True, on_step=again.append, **run)
        found[name] = {
            "difference": difference(whole.model, of_whole_models(name, optimizer, options, replicas, tuple(cut))),
            "resumed": same_bits(whole.model, rest.model) and rest.first_step == 4,
            "events": [_of(event) for event in seen[4:]] == [_of(event) for event in again],
            "rounds": seen[-1]["sync_rounds"],
            "sent": [event["sync_bytes"] for event in seen],
        }
    return found


def forget_the_last_step(folder: Path) -> None:
    """Leave the checkpoints that a run would have left that was killed before its last one."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for path in (*folder.glob(f"replica-*/step-{STEPS - 1:08d}"), *folder.glob("step-*")):
            shutil.rmtree(path)
    torch.distributed.barrier()


def _of(event: dict[str, Any]) -> dict[str, Any]:
    return {key: repr(event[key]) for key in ("step", "loss", "lr", "sync_bytes", "sync_rounds")}


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    found = [[_local(param).clone() for param in module.parameters()] for module in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*found))


def _local(param: Tensor) -> Tensor:
    return sync.replica.local(param.detach())


def goes_on(plan: str, folder: str, replicas: int, steps: int, name: str, optimizer: str, options: dict[str, Any]
            ) -> dict[str, Any]:  # fmt: skip
    """Begin a run, or go on from one of another number of replicas; what it says, and whether all end with the same."""
    told: list[str] = []
    resume = (Path(folder) / "replica-0").exists()
    torch.distributed.barrier()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "emit", lambda event: told.append(event.get("text", "")))
        run = trained(
            Plan.parse(plan), name, optimizer, options, steps=steps, replicas=replicas, checkpoint=folder, resume=resume
        )
    held: list[Any] = [None] * launch.world_size()
    torch.distributed.all_gather_object(held, [_local(param).tolist() for param in run.model.parameters()])
    return {"told": told, "first": run.first_step, "alike": all(each == held[0] for each in held), "weights": held[0]}


def skips_nan(plan: str, metrics: str) -> dict[str, Any]:
    """One replica's loss is NaN once: it never leads, all go on, and end alike."""
    stream = batches()
    stream[3] = (stream[3][0] * float("nan"),)  # replica 1, step 1
    built = Squares.build()
    seen: list[Any] = []
    run = tw.train(
        built["model"], Plan.parse(plan), stream, loss_fn=Squares.loss, optimizer="sgd", lr=0.02, steps=4, sync="lsgd",
        sync_options={"global_period": 2, "group_period": 2}, on_nan="skip", on_step=seen.append, metrics=metrics,
    )  # fmt: skip
    weights = [_local(param) for param in run.model.parameters()]
    return {
        "finite": all(bool(torch.isfinite(weight).all()) for weight in weights),
        "skipped": [event["skipped"] for event in seen],
        "lines": len(Path(metrics).read_text().splitlines()) if torch.distributed.get_rank() == 0 else 0,
        "weights": json.dumps([weight.tolist() for weight in weights]),
    }


def refusals(plan: str, alone: str) -> list[str]:
    """Return the errors of a planned module without replicas, and of more replicas than there are ranks."""
    built, said = Squares.build(), []
    module = tw.parallelize(built["model"], Plan.parse(plan), loss_fn=Squares.loss)
    for attempt in (
        lambda: sync.create("diloco", module, torch.optim.SGD(module.parameters(), lr=0.1)),
        lambda: tw.parallelize(built["model"], Plan.parse(plan), loss_fn=Squares.loss, replicas=2),
    ):
        try:
            attempt()
        except tw.UserError as error:
            said.append(str(error))
    return said
