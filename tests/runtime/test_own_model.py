"""`model(x)`, `criterion(output, y)`: what the forward does not take goes to the loss, in every verb."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests import own_model_cases
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.capture.call import call_model, loss_of
from trainwright.capture.export import as_batch

CASES = "tests.own_model_cases:"
X, Y, W = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([1, 0]), torch.tensor([0.25, 2.0])


class Takes(nn.Module):
    """Doubles what it is given, and remembers its arguments."""

    def forward(self, x):
        self.given = {"x": x}
        return 2 * x


class TakesMask(nn.Module):
    def forward(self, x, mask=None):
        self.given = {"x": x} if mask is None else {"x": x, "mask": mask}
        return 2 * x


class TakesAny(nn.Module):
    def forward(self, *args, **kwargs):
        self.given = {**dict(enumerate(args)), **kwargs}
        return 2 * (args[0] if args else kwargs["x"])


def own(output, target):
    return F.cross_entropy(output, target)


def annotated(output: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(output, wanted)


def weighted(output, labels, weights):
    return (F.cross_entropy(output, labels, reduction="none") * weights).mean()


def whole(output, batch):
    y = batch["y"] if isinstance(batch, dict) else batch[1]
    return F.cross_entropy(output, y)


CROSS = nn.CrossEntropyLoss()
SHARED_OUT: list[tuple[Any, Any, Any, list[Any], float]] = [
    (Takes, (X, Y), CROSS, ["x"], float(CROSS(2 * X, Y))),
    (Takes, [X, Y], F.cross_entropy, ["x"], float(CROSS(2 * X, Y))),
    (Takes, (X, Y), functools.partial(F.cross_entropy, reduction="sum"), ["x"], 2 * float(CROSS(2 * X, Y))),
    (Takes, (X, X), nn.MSELoss(), ["x"], float((X * X).mean())),
    (Takes, (X, Y, W), weighted, ["x"], float(weighted(2 * X, Y, W))),
    (Takes, {"x": X, "labels": Y}, CROSS, ["x"], float(CROSS(2 * X, Y))),
    (Takes, {"weights": W, "x": X, "labels": Y}, weighted, ["x"], float(weighted(2 * X, Y, W))),
    (Takes, (X, Y), whole, ["x"], float(CROSS(2 * X, Y))),
    (Takes, {"x": X, "y": Y}, whole, ["x"], float(CROSS(2 * X, Y))),
    (Takes, (X,), lambda output: output.mean(), ["x"], float(2 * X.mean())),
    (Takes, X, lambda output, given: output.mean() + len(given), ["x"], float(2 * X.mean()) + 1),
    (TakesMask, (X, Y), CROSS, ["x"], float(CROSS(2 * X, Y))),
    (TakesMask, (X, Y), own, ["x"], float(CROSS(2 * X, Y))),
    (TakesMask, (X, Y), annotated, ["x"], float(CROSS(2 * X, Y))),
    (TakesMask, (X, W, Y), CROSS, ["x", "mask"], float(CROSS(2 * X, Y))),
    (TakesMask, (X, W), lambda output, given: given[1].sum(), ["x", "mask"], 2.25),
    (TakesAny, (X, Y), lambda output, given: given[1].sum() * 1.0, [0, 1], 1.0),
    (TakesAny, (X, Y), CROSS, [0], float(CROSS(2 * X, Y))),
    (TakesAny, {"x": X, "target": Y}, CROSS, ["x"], float(CROSS(2 * X, Y))),
    (TakesAny, {"x": X, "y": Y}, whole, ["x", "y"], float(CROSS(2 * X, Y))),
]


@pytest.mark.parametrize(("kind", "batch", "loss_fn", "taken", "value"), SHARED_OUT)
def test_the_forward_takes_what_it_names_and_the_loss_the_rest(
    kind: Any, batch: Any, loss_fn: Any, taken: list[Any], value: float
) -> None:
    model, batch = kind(), as_batch(batch)
    output = call_model(model, batch, loss_fn)
    assert list(model.given) == taken
    assert float(loss_of(model, batch, loss_fn, output)) == pytest.approx(value)


NOT_SHARED_OUT: list[tuple[Any, Any, Any, tuple[str, ...]]] = [
    (Takes, (X, Y), None, ("loss_fn is needed", "forward takes x", "entry 1", "CrossEntropyLoss()")),
    (Takes, {"x": X, "label": Y}, None, ("loss_fn is needed", "label")),
    (Takes, (X, Y, W), CROSS, ("entries 1, 2", "CrossEntropyLoss takes input, target")),
    (Takes, (X,), CROSS, ("leaves nothing", "add the target to the batch")),
    (Takes, (X, Y), lambda output: output.mean(), ("entry 1", "give the loss a parameter")),
    (Takes, {"x": X, "a": Y, "b": W}, CROSS, ("leaves a, b", "the names of these entries")),
    (TakesMask, (X, Y), lambda output, given: F.cross_entropy(output, given), ("mask may be left out", "`target`")),
    (Takes, (X, Y), nn.CrossEntropyLoss, ("the class CrossEntropyLoss", "give CrossEntropyLoss()")),
    (Takes, (X, Y), "cross_entropy", ("'cross_entropy'", "torch.nn.CrossEntropyLoss()")),
]


@pytest.mark.parametrize(("kind", "batch", "loss_fn", "parts"), NOT_SHARED_OUT)
def test_what_nobody_takes_is_said(kind: Any, batch: Any, loss_fn: Any, parts: tuple[str, ...]) -> None:
    model = kind()
    with pytest.raises(UserError) as caught:
        loss_of(model, batch, loss_fn, call_model(model, batch, loss_fn))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ((X.numpy(), Y), ("entry 0", "numpy", "torch.as_tensor")),
        (X.numpy(), ("ndarray", "torch.as_tensor")),
        (torch.utils.data.DataLoader([1, 2]), ("DataLoader", "next(iter(")),
    ],
)
def test_what_is_no_batch_says_how_to_make_one(batch: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        tw.profile(Takes(), batch, loss_fn=CROSS)
    for part in parts:
        assert part in str(caught.value)


def test_an_entry_that_nobody_uses_is_named() -> None:
    model, (x, y), loss_fn = own_model_cases.build("tuple")
    batch = {"x": x, "labels": y, "lables": y}
    found = tw.plan(model, batch, loss_fn=lambda output, batch: loss_fn(output, batch["labels"]), hardware="cpu:1")
    assert "neither the model nor the loss uses lables of the batch" in found.notes


@cache
def planned(form: str, solver: str, micro_batches: int = 1) -> str:
    model, batch, loss_fn = own_model_cases.build(form)
    options: dict[str, Any] = {"solver": solver, "micro_batches": micro_batches, "optimizer": "sgd"}
    return tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:2", **options).to_json()


@pytest.mark.parametrize(
    ("form", "solver", "micro_batches"),
    slow_but(
        [("dict", "joint", 1), ("tuple", "megatron", 2)],
        [("tuple", "fsdp", 1), ("dict", "joint", 1), ("tuple", "megatron", 2)],
    ),
)
def test_planned_training_equals_the_loop_that_anybody_would_write(
    pool2: Pool, form: str, solver: str, micro_batches: int
) -> None:
    plan = planned(form, solver, micro_batches)
    assert max(pool2.run(CASES + "trains_like_one_process", plan=plan, form=form)) < 1e-14
    found = pool2.run(CASES + "verifies", plan=plan, form=form)[0]
    assert found["passed"]
    assert found["error"] < 1e-12


def test_a_dataset_of_pairs_is_trained_on(pool2: Pool) -> None:
    for differences in pool2.run(CASES + "trains_on_examples", plan=planned("tuple", "fsdp")):
        assert len(differences) == 3
        assert max(map(abs, differences)) < 1e-14


def test_a_plan_knows_which_loss_it_was_made_with(pool2: Pool) -> None:
    plan = planned("tuple", "fsdp")
    assert tw.Plan.parse(plan).loss_fn == "CrossEntropyLoss"
    for said in pool2.run(CASES + "forgets_the_loss", plan=plan):
        assert "it was CrossEntropyLoss, none is given here; pass loss_fn=" in said
    model, batch = nn.Linear(3, 1), (torch.ones(4, 3),)
    made = tw.plan(nn.Sequential(model, nn.Flatten(0), Mean()), batch, hardware="cpu:1")
    assert made.loss_fn == ""
    with pytest.raises(UserError, match="the one that the model returns, here loss_fn is mse_loss; leave loss_fn out"):
        tw.parallelize(model, made, loss_fn=F.mse_loss)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
import trainwright as tw

torch.manual_seed(0)
model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.arange(8) % 3
plan = tw.Plan.from_json({plan!r})
{before}
module = tw.parallelize(model, plan, loss_fn=nn.CrossEntropyLoss())
loss = module(*plan.shard_batch((x, y))).loss
loss.backward()
assert abs(float(loss) - float(nn.functional.cross_entropy(model(x), y))) < 1e-6
print(f"rank {{dist.get_rank()}} is done\\n", end="", flush=True)
{after}
"""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    batch = (torch.ones(8, 4), torch.arange(8) % 3)
    tw.plan(nn.Linear(4, 3), batch, loss_fn=CROSS, hardware="cpu:2", solver="ddp").to_json(path)
    return path


def _ended(script: Path, plan: Path, before: str = "", after: str = "") -> Any:
    script.write_text(SCRIPT.format(plan=str(plan), before=before, after=after))
    under = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    return subprocess.run([sys.executable, *under, str(script)], capture_output=True, text=True, timeout=120, env=env)


def test_a_script_needs_no_process_group_of_its_own(plan_path: Path, tmp_path: Path) -> None:
    """Asked for before, as `tw.init()`, or not at all; one rank ends late, and nobody complains."""
    late = "tw.init(); tw.init()\nimport atexit, time\nif dist.get_rank(): atexit.register(time.sleep, 1)"
    done = _ended(tmp_path / "script.py", plan_path, before=late)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 2
    assert "Traceback" not in done.stderr
    assert "destroy_process_group" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_the_others(plan_path: Path, tmp_path: Path) -> None:
    done = _ended(tmp_path / "script.py", plan_path, after="if dist.get_rank(): raise SystemError('on purpose')")
    assert done.returncode != 0
    assert "on purpose" in done.stderr


def test_a_process_alone_is_told_to_use_torchrun(plan_path: Path) -> None:
    with pytest.raises(UserError, match="torchrun --nproc-per-node 2"):
        tw.parallelize(nn.Linear(4, 3), tw.Plan.from_json(plan_path), loss_fn=CROSS)


class NamedAsOurs(nn.Module):
    """Has parts under names that a planned module has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.plan = nn.Linear(2, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("num_steps", torch.zeros(()))
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_steps += 1
            self.steps += 2
        return (self.adapter(x) * self.plan).square().mean()


def test_parts_of_a_model_may_have_any_name() -> None:
    model, own_copy = NamedAsOurs(), NamedAsOurs()
    own_copy.load_state_dict(model.state_dict())
    plan = tw.plan(model, (X,), hardware="cpu:1")
    module = tw.parallelize(model, plan)
    for trained in (module, own_copy):
        for _ in range(2):
            trained(X).backward()
    assert module.num_steps == 2
    assert module.plan is plan
    assert set(module.state_dict()) == set(own_copy.state_dict())
    assert dict(module.named_buffers())["steps"].item() == 4.0
    for name, value in tw.full_state_dict(module).items():
        assert torch.equal(value, own_copy.state_dict()[name])
    for name, grad in ((name, param.grad) for name, param in own_copy.named_parameters()):
        assert torch.allclose(dict(module.named_parameters())[name].grad.full_tensor(), grad)
    module.load_state_dict(module.state_dict())
