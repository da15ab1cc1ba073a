"""Ordinary training code around a planned module, called by `tests/integrations/test_training_code.py` on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw
from tests.checkpoint_cases import DROPOUT_OFF
from trainwright.artifacts import Plan
from trainwright.models import zoo


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Examples for a small causal language model."""

    def __init__(self, num_examples: int, length: int = 32) -> None:
        generator = torch.Generator().manual_seed(4)
        self.ids = torch.randint(0, 200, (num_examples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def _model(name: str) -> nn.Module:
    return zoo.build(name, device="cpu", dtype="fp64", **DROPOUT_OFF[name])[0]


def whole_loop(plan: str, name: str) -> dict[str, float]:
    """Accumulate, clip, schedule, evaluate and go on, beside one process: the largest differences."""
    parsed, model, data = Plan.parse(plan), _model(name), Sequences(24)
    alone = copy.deepcopy(model)
    module = tw.parallelize(model, parsed, seed=0)
    found: list[list[float]] = []
    for current, batches in ((module, _parts(parsed, data)), (alone, _globals(parsed, data))):
        optimizer = torch.optim.AdamW(current.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=4)
        values = []
        for step in range(3):
            current.train()
            optimizer.zero_grad()
            for micro in range(2):
                loss = current(**batches[2 * step + micro]).loss / 2
                loss.backward()
            norm = nn.utils.clip_grad_norm_(current.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            current.eval()
            with torch.no_grad():
                values += [float(loss.detach()), float(norm), float(current(**batches[0]).loss)]
        found.append(values)
    weights, reference = tw.full_state_dict(module), alone.state_dict()
    return {
        "values": max(abs(a - b) / abs(b) for a, b in zip(*found)),
        "weights": max(float((weights[key].double() - value.double()).abs().max()) for key, value in reference.items()),
    }


def _parts(plan: Plan, data: Sequences) -> list[Any]:
    """The loader's way: each rank loads its rows alone."""
    loader = DataLoader(data, batch_sampler=plan.sampler(data, seed=3))
    return [plan.shard_batch({**batch, **plan.literals}) for batch in loader]


def _globals(plan: Plan, data: Sequences) -> list[Any]:
    """The same batches whole, as one process has them."""
    from trainwright.runtime import PlanSampler

    everything = plan.model_copy(update={"batch": {k: _unsplit(entry) for k, entry in plan.batch.items()}})
    loader = DataLoader(data, batch_sampler=PlanSampler(everything, data, seed=3, coords=(0,) * len(plan.mesh)))
    return [{**batch, **plan.literals} for batch in loader]


def _unsplit(entry: Any) -> Any:
    return entry.model_copy(update={"layout": ("R",) * len(entry.layout)})


def loads_its_rows(plan: str) -> dict[str, Any]:
    """Whether this rank's loader gives what cutting the global batches gives, and what share of the rows it loads."""
    parsed, data = Plan.parse(plan), Sequences(24)
    own, whole = _parts(parsed, data), [parsed.shard_batch(batch) for batch in _globals(parsed, data)]
    same = all(torch.equal(a[key], b[key]) for a, b in zip(own, whole) for key in ("input_ids", "labels"))
    sampler = parsed.sampler(data)
    sampler.start_at(len(sampler) + 2)
    later, full = list(sampler), list(sampler)
    sampler.set_epoch(1)
    return {
        "same": same and len(own) == len(whole) == 6,
        "share": len(sampler.rows) / sampler.batch_size,
        "goes_on": list(sampler)[2:] == later and len(full) == 6,
        "shuffled": full[0] != later[0],
    }


def padded_loss(plan: str, name: str, num_examples: int) -> dict[str, float]:
    """The loss of the last, padded batch beside that of its real rows in one process."""
    parsed, model, data = Plan.parse(plan), _model(name), Sequences(num_examples)
    alone = copy.deepcopy(model).eval()
    module = tw.parallelize(model, parsed, seed=0).eval()
    padded = parsed.padded(data)
    loader = DataLoader(padded, batch_sampler=parsed.sampler(padded, shuffle=False, last="pad"))
    batches = list(loader)
    size = next(iter(parsed.batch.values())).shape[0]
    rows = {
        key: torch.stack([data[i][key] for i in range(num_examples // size * size, num_examples)]) for key in data[0]
    }
    with torch.no_grad():
        found = float(module(**parsed.shard_batch({**batches[-1], **parsed.literals})).loss)
        expected = float(alone(**rows, **parsed.literals).loss)
    return {"difference": abs(found - expected) / abs(expected), "num_batches": len(batches)}


def other_shape(plan: str, num_rows: int) -> None:
    parsed, data = Plan.parse(plan), Sequences(num_rows, length=32)
    parsed.shard_batch({"input_ids": data.ids, "labels": data.ids})


def autocast(plan: str, name: str) -> dict[str, Any]:
    """Steps in bf16 on weights in fp32, beside torch's own autocast in one process."""
    parsed = Plan.parse(plan)
    model, batch = zoo.build(name, device="cpu", **DROPOUT_OFF[name])
    alone = copy.deepcopy(model)
    module = tw.parallelize(model, parsed, seed=0)
    losses: list[list[float]] = []
    for current, fed in ((module, parsed.shard_batch(batch)), (alone, batch)):
        optimizer = torch.optim.AdamW(current.parameters(), lr=1e-3)
        values = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=current is alone):
                loss = current(**fed).loss
            loss.backward()
            optimizer.step()
            values.append(float(loss.detach()))
        losses.append(values)
    dtypes = {str(p.dtype) for p in module.parameters()} | {
        str(p.grad.dtype) for p in module.parameters() if p.grad is not None
    }
    return {
        "dtypes": sorted(dtypes),
        "worst": max(abs(a - b) / abs(b) for a, b in zip(*losses)),
        "fell": losses[0][-1] < losses[0][0],
    }


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor]]):
    """Points, whose norm a small network is to learn; and the function that the command line would be given."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.linspace(-1, 1, 6, dtype=torch.float64).roll(index) * (1 + index),)

    @staticmethod
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output.mean(1) - batch[0].square().mean(1)).square().mean()

    @classmethod
    def build(cls) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()
        return {"model": model, "batch": (cls()[0][0].expand(4, 6),), "loss_fn": cls.loss, "dataset": cls()}


def trains_as_one_process(plan: str, folder: str) -> dict[str, Any]:
    """`tw.train` beside a plain loop: losses and weights, in one run and in one that was interrupted."""
    from trainwright.runtime import ExampleBatches

    parsed, steps, seen = Plan.parse(plan), 5, []
    whole = tw.train(Squares.build, parsed, steps=steps, optimizer=torch.optim.SGD, lr=0.01, on_step=seen.append)
    tw.train(Squares.build, parsed, steps=3, optimizer="sgd", lr=0.01, checkpoint=folder)
    rest = tw.train(Squares.build, parsed, steps=steps, optimizer="sgd", lr=0.01, checkpoint=folder, resume=True)
    alone, losses = Squares.build()["model"], []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for _, batch in zip(range(steps), ExampleBatches(parsed, Squares())):
        optimizer.zero_grad()
        loss = Squares.loss(alone(*batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    weights, again = tw.full_state_dict(whole.model), tw.full_state_dict(rest.model)
    return {
        "losses": max(abs(a - b) / b for a, b in zip(whole.losses, losses, strict=True)),
        "weights": max(float((weights[key] - value).abs().max()) for key, value in alone.state_dict().items()),
        "resumed": rest.first_step == 3 and rest.losses == whole.losses[3:],
        "same_weights": all(torch.equal(weights[key], again[key]) for key in weights),
        "steps": [event["step"] for event in seen],
    }
