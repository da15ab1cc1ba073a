"""Batches smaller than planned on real ranks beside one process; called by `tests/program/test_shapes.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import trainwright as tw
from tests.models import batches, micro
from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan, UserError
from trainwright.artifacts.cache_directory import cache_folder
from trainwright.capture.cached import cached_capture
from trainwright.capture.export import as_batch, find_loss
from trainwright.models import zoo
from trainwright.program.program import build_program
from trainwright.runtime.module import LossOutput, ParallelModule, full_gradients
from trainwright.runtime.verification.verify import gradient_errors, relative
from trainwright.torch_internals.private import flatten_batch

DROPOUT_OFF = {"gpt2-tiny": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
               "bert-tiny": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
               "t5-tiny": {"dropout_rate": 0.0}}  # fmt: skip


class Net(nn.Module):
    """Convolutions and batch norm, which takes statistics of all rows, and a head whose loss is a function's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 8, 3, stride=2), nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.norm(self.first(image)))))
        return self.head(hidden.mean((2, 3)))


def _loss(output: Tensor, batch: Any) -> Tensor:
    """A mean over rows and classes; the labels are the batch's second entry, which the model does not take."""
    return nn.functional.mse_loss(output, batch["wanted"]) + output.square().sum() / 100


class _ByName(Net):
    def forward(self, image: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        del wanted
        return super().forward(image)


def build(name: str) -> tuple[nn.Module, Any, Any]:
    """A model in float64, its batch and its loss function, the same on every rank."""
    torch.manual_seed(0)
    if name == "net":
        return (
            _ByName().double(),
            {"image": torch.randn(6, 3, 8, 8).double(), "wanted": torch.randn(6, 5).double()},
            _loss,
        )
    if name == "masked":
        model, batch = batches.masked()
        batch["extra"]["bias"] = batch["extra"]["bias"].double()
        return model.double(), batch, None
    if name in ("uneven_labels", "with_dropout"):
        model, batch = getattr(micro, name)()
        return model.double(), (batch[0].double(), batch[1]), None
    return *zoo.build(name, device="cpu", dtype="fp64", **DROPOUT_OFF.get(name, {})), None


def cut(batch: Any, rows: int, length: int | None) -> Any:
    """The first rows of every entry and, of entries of tokens, the first `length` of each row."""
    named, rebuild = flatten_batch(as_batch(batch))
    return rebuild([_cut(leaf, rows, length) if isinstance(leaf, Tensor) else leaf for _, leaf in named])


def _cut(leaf: Tensor, rows: int, length: int | None) -> Tensor:
    return (leaf[:rows, :length] if leaf.dim() == 2 and length else leaf[:rows]).clone()


def random_plan(name: str, mesh: Sequence[int], seed: int, offload: float = 0.0) -> Plan:
    """A plan drawn from the whole strategy space, for the model of that name."""
    model, batch, loss_fn = build(name)
    program = build_program(cached_capture(model, batch, loss_fn))
    literals = {key: leaf for key, leaf in flatten_batch(as_batch(batch))[0] if not isinstance(leaf, Tensor)}
    return plan_of(program, random_decisions(program, tuple(mesh), seed, offload=offload), literals)


@contextmanager
def exact() -> Iterator[None]:
    """Let a model's own casts to fp32 be none, so that float64 is float64 in the model and in what is captured of it.

    Captures made inside are kept in a folder of their own: under the same key, other tests would take them for the model's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setenv("TRAINWRIGHT_CACHE", str(cache_folder() / "exact"))
        yield


@exact()
def beside_one_process(
    plan: Any, name: str, shapes: Sequence[tuple[int, int | None]], buffers: bool = True
) -> dict[str, Any]:
    """Steps and evaluations on batches of these (rows, length); the largest errors, and where.

    plan: a plan's JSON, or what `random_plan` takes.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else random_plan(name, **plan)
    model, batch, loss_fn = build(name)
    module = tw.parallelize(copy.deepcopy(model), parsed, loss_fn=loss_fn, seed=0)
    worst: dict[str, Any] = {"error": 0.0, "at": None, "captured": 0}
    notes: list[str] = []
    module.steps.notice = notes.append
    for rows, length in shapes:
        fed = cut(batch, rows, length)
        for error, what in _errors(module, model, fed, loss_fn, parsed):
            if not error <= worst["error"]:
                worst.update(error=error, at=[rows, length, what])
    worst["captured"] = len(notes)
    return worst


def _errors(module: ParallelModule, model: nn.Module, fed: Any, loss_fn: Callable[..., Tensor] | None, plan: Plan):
    """Yield the errors of loss, gradients, buffers, and of the loss in evaluation."""
    alone = model
    for current in (module, alone):
        current.train()
        current.zero_grad()
    part = plan.shard_batch(fed, rows="all")
    found, wanted = find_loss(_call(module, part)), _alone(alone, fed, loss_fn)
    found.backward()
    wanted.backward()
    yield relative(float(found.detach()), float(wanted.detach())), "loss"
    reference = {key: param.grad for key, param in alone.named_parameters() if param.grad is not None}
    errors = gradient_errors(full_gradients(module), reference)
    yield max((error, key) for key, error in errors.items())
    own = dict(module.named_buffers())
    for key, buffer in alone.named_buffers():
        if key.endswith("num_batches_tracked"):
            continue  # a count of steps that nothing reads
        yield float((own[key].double() - buffer.double()).abs().max()), key
    for current in (module, alone):
        current.eval()
    with torch.no_grad():
        output = _call(module, plan.shard_batch(fed, rows="all"))
        yield relative(float(find_loss(output)), float(_alone(alone, fed, loss_fn))), "evaluation"
        if isinstance(output, LossOutput):
            logits = output.output.full_tensor() if isinstance(output.output, DTensor) else output.output
            yield float((logits - alone(**fed)).abs().max()), "output"


def _call(module: nn.Module, part: Any) -> Any:
    return module(**part) if isinstance(part, dict) else module(*part)


def _alone(model: nn.Module, fed: Any, loss_fn: Callable[..., Tensor] | None) -> Tensor:
    output = _call(model, fed)
    return find_loss(output) if loss_fn is None else loss_fn(output, fed)


def _copied(part: Any) -> Any:
    """The same tensors, anew: what a user's own moving of a part to a device comes to."""
    named, rebuild = flatten_batch(part)
    return rebuild([leaf.clone() if isinstance(leaf, Tensor) else leaf for _, leaf in named])


def refused(plan: str, name: str) -> dict[str, str]:
    """What the module says of a part whose batch it cannot know, and of parts of two batches."""
    parsed = Plan.parse(plan)
    model, batch, _ = build(name)
    module = tw.parallelize(model, parsed)
    said = {}
    short = parsed.shard_batch(cut(batch, 3, None), rows="all")
    longer = parsed.shard_batch(cut(batch, 4, None), rows="all")
    cases = {
        "unmarked": _copied(short),
        "mixed": {**longer, "labels": short["labels"]},
    }
    for case, part in cases.items():
        if case == "unmarked" and dist.get_rank() == 0:
            continue  # it would wait for the other rank, which does not come
        try:
            module(**part)
            said[case] = ""
        except UserError as error:
            said[case] = str(error)
    return said


def loader_with_a_short_batch(plan: str, num_examples: int, workers: int = 0) -> dict[str, Any]:
    """Two epochs of a loader with `last="short"`: the rows of each batch, and the largest error of a loss."""
    from torch.utils.data import DataLoader, TensorDataset

    from trainwright.runtime.training.sampler import PlanSampler

    parsed = Plan.parse(plan)
    model, _, loss_fn = build("net")
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(num_examples, 3, 8, 8, generator=generator, dtype=torch.float64),
        torch.randn(num_examples, 5, generator=generator, dtype=torch.float64),
    )
    module = tw.parallelize(copy.deepcopy(model), parsed, loss_fn=loss_fn, seed=0)
    sampler = parsed.sampler(data, seed=1, last="short")
    order = PlanSampler(parsed, data, seed=1, last="short", whole=True).order
    worst, num_rows, step = 0.0, [], 0
    for _ in range(2):
        for image, wanted in DataLoader(data, batch_sampler=sampler, num_workers=workers):
            whole = [torch.stack(column) for column in zip(*(data[index] for index in order.batch(step)))]
            found = module(**parsed.shard_batch({"image": image, "wanted": wanted})).loss
            reference = _alone(model, {"image": whole[0], "wanted": whole[1]}, loss_fn)
            worst, step = max(worst, relative(float(found.detach()), float(reference.detach()))), step + 1
            num_rows.append(len(image))
    return {"error": worst, "rows": num_rows}
