"""B models as one: every value, gradient, statistic and random number is what the models have alone, in float64."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fusion_models import MODELS, Convolutional
from trainwright import fusion, optim
from trainwright.artifacts import UserError
from trainwright.schedules import LinearDecay

SEEDS = [5, 6, 7]
CRITERION = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def train_alone(
    model: nn.Module, optimizer: Any, batches: list[Any], seed: int, clip: float | None = None, schedule: Any = None
) -> None:
    torch.manual_seed(seed)
    for x, y in batches:
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def train_fused(fused: fusion.FusedModel, optimizer: Any, batches: list[Any], schedule: Any = None) -> Tensor:
    for batch in batches:
        optimizer.zero_grad()
        losses = fused.loss(batch, CRITERION)
        losses.sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return losses.detach()


def make(kind: str, num: int = 3) -> tuple[list[nn.Module], list[Any]]:
    build, batch = MODELS[kind]
    return [build() for _ in range(num)], [batch() for _ in range(4)]


@pytest.mark.parametrize("kind", MODELS)
def test_a_fused_run_is_the_runs_alone(kind: str) -> None:
    """Momentum, rates and decay of each, dropout from each one's stream, running statistics."""
    models, batches = make(kind)
    alone = copy.deepcopy(models)
    fused = fusion.fuse(models, seeds=SEEDS)
    rates, decays = [0.01, 0.1, 0.3], [0.0, 0.1, 0.01]
    train_fused(fused, fusion.optimizer("sgd-momentum", fused, lr=rates, weight_decay=decays), batches)
    for model, seed, lr, decay, found in zip(alone, SEEDS, rates, decays, fused.unfuse(), strict=True):
        train_alone(model, optim.create("sgd-momentum", model.parameters(), lr=lr, weight_decay=decay), batches, seed)
        assert largest_difference(model, found) < 1e-12


ELEMENTWISE = [name for name in optim.names() if not optim.record(name).needs_loss and name != "muon"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_updates_each_model_as_alone(name: str) -> None:
    models = [nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)) for _ in SEEDS]
    batches = [(torch.randn(8, 5), torch.randint(0, 3, (8,))) for _ in range(4)]
    alone, rates, clips = copy.deepcopy(models), [0.01, 0.02, 0.005], [0.5, 100.0, 0.05]
    fused = fusion.fuse(models)
    train_fused(fused, fusion.optimizer(name, fused, lr=rates, clip=clips), batches)
    for model, lr, clip, found in zip(alone, rates, clips, fused.unfuse(), strict=True):
        train_alone(model, optim.create(name, model.parameters(), lr=lr), batches, 0, clip)
        assert largest_difference(model, found) < 1e-12


def test_the_list_of_optimizers_is_not_short() -> None:
    assert len(ELEMENTWISE) > 25


SCHEDULES: dict[str, tuple[Callable[..., Any], dict[str, list[Any]]]] = {
    "step": (torch.optim.lr_scheduler.StepLR, {"step_size": [1, 2, 3], "gamma": [0.5, 0.9, 0.1]}),
    "cosine": (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": [4, 8, 5]}),
    "linear decay": (LinearDecay, {"num_steps": [4, 9, 6]}),
    "one cycle": (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": [0.1, 0.2, 0.3], "total_steps": [9, 9, 12]}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_model_has_its_own_schedule(name: str) -> None:
    kind, vectors = SCHEDULES[name]
    models, batches = make("gpt")
    alone, fused = copy.deepcopy(models), fusion.fuse(models, seeds=SEEDS)
    optimizer = fusion.optimizer("adamw", fused, lr=[1e-2, 1e-3, 3e-3])
    train_fused(fused, optimizer, batches, fusion.schedule(kind, optimizer, **vectors))
    for at, (model, found) in enumerate(zip(alone, fused.unfuse(), strict=True)):
        own = optim.create("adamw", model.parameters(), lr=[1e-2, 1e-3, 3e-3][at])
        train_alone(
            model, own, batches, SEEDS[at], None, kind(own, **{key: values[at] for key, values in vectors.items()})
        )
        assert largest_difference(model, found) < 1e-12


def test_groups_have_settings_of_their_own() -> None:
    models, batches = make("encoder", 2)
    alone, fused = copy.deepcopy(models), fusion.fuse(models)
    groups = [{"params": ["*.bias", "*norm*"], "weight_decay": 0.0, "lr": [0.1, 0.2]}]
    train_fused(fused, fusion.optimizer("sgd", fused, lr=0.05, weight_decay=0.5, groups=groups), batches)
    for at, (model, found) in enumerate(zip(alone, fused.unfuse(), strict=True)):
        bare = [value for name, value in model.named_parameters() if name.endswith(".bias") or "norm" in name]
        rest = [value for name, value in model.named_parameters() if not (name.endswith(".bias") or "norm" in name)]
        own = torch.optim.SGD(
            [{"params": rest}, {"params": bare, "weight_decay": 0.0, "lr": [0.1, 0.2][at]}], 0.05, weight_decay=0.5
        )
        train_alone(model, own, batches, at)
        assert largest_difference(model, found) < 1e-12


def test_rates_of_dropout_may_differ_and_batches_too() -> None:
    models, _ = make("convolutional")
    for model, rate in zip(models, (0.0, 0.3, 0.7)):
        model.drop.p = rate
    batches = [[MODELS["convolutional"][1]() for _ in SEEDS] for _ in range(3)]
    alone, fused = copy.deepcopy(models), fusion.fuse(models, seeds=SEEDS)
    optimizer = fusion.optimizer("sgd", fused, lr=0.1)
    for each in batches:
        train_fused(fused, optimizer, [fused.stack(each)])
    for at, (model, found) in enumerate(zip(alone, fused.unfuse(), strict=True)):
        if at == 0:
            model.drop.p = found.drop.p
        train_alone(model, torch.optim.SGD(model.parameters(), 0.1), [each[at] for each in batches], SEEDS[at])
        assert largest_difference(model, found) < 1e-12
    assert [model.drop.p for model in fused.unfuse()] == [0.0, 0.3, 0.7]


@pytest.mark.parametrize("how", ["skip", "stop"])
def test_a_model_without_a_finite_gradient_is_left_and_the_others_go_on(how: str) -> None:
    models, batches = make("convolutional")
    with torch.no_grad():
        models[1].two.weight[0, 0, 0, 0] = float("nan")
    before, alone = copy.deepcopy(models[1]), copy.deepcopy(models)
    fused = fusion.fuse(models, seeds=SEEDS)
    optimizer = fusion.optimizer("adamw", fused, lr=1e-2, on_nan=how)
    train_fused(fused, optimizer, batches)
    found = fused.unfuse()
    for at in (0, 2):
        train_alone(alone[at], optim.create("adamw", alone[at].parameters(), lr=1e-2), batches, SEEDS[at])
        assert largest_difference(alone[at], found[at]) < 1e-12
    pairs = zip(found[1].parameters(), before.parameters(), strict=True)
    assert all(torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in pairs)
    assert optimizer.running == [True, how == "skip", True]


def test_models_that_are_kept_go_on_where_they_stood() -> None:
    models, batches = make("gpt")
    alone, fused = copy.deepcopy(models), fusion.fuse(models, seeds=SEEDS)
    optimizer = fusion.optimizer("adamw", fused, lr=[1e-2, 1e-3, 3e-3], clip=[1.0, 2.0, 0.1])
    rates = fusion.schedule(torch.optim.lr_scheduler.StepLR, optimizer, step_size=[1, 2, 3])
    train_fused(fused, optimizer, batches[:2], rates)
    fewer = fused.keep([2, 0])
    kept = optimizer.keep([2, 0], fewer)
    train_fused(fewer, kept, batches[2:], rates.keep([2, 0], kept))
    for at, found in zip((2, 0), fewer.unfuse(), strict=True):
        own = optim.create("adamw", alone[at].parameters(), lr=[1e-2, 1e-3, 3e-3][at])
        scheduler = torch.optim.lr_scheduler.StepLR(own, step_size=[1, 2, 3][at])
        train_alone(alone[at], own, batches, SEEDS[at], [1.0, 2.0, 0.1][at], scheduler)
        assert largest_difference(alone[at], found) < 1e-12


def test_a_run_that_is_loaded_goes_on_to_the_bit() -> None:
    models, batches = make("encoder", 2)
    fused = fusion.fuse(models)
    optimizer = fusion.optimizer("adamw", fused, lr=[1e-2, 1e-3])
    train_fused(fused, optimizer, batches[:2])
    saved = copy.deepcopy((fused.state_dict(), optimizer.state_dict(), fused.streams.state_dict()))
    train_fused(fused, optimizer, batches[2:])
    other = fusion.fuse(make("encoder", 2)[0])
    again = fusion.optimizer("adamw", other, lr=[1e-2, 1e-3])
    for target, state in zip((other, again, other.streams), saved, strict=True):
        target.load_state_dict(state)
    train_fused(other, again, batches[2:])
    assert all(largest_difference(one, two) == 0.0 for one, two in zip(fused.unfuse(), other.unfuse(), strict=True))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad  # not what autograd would find


class Odd(nn.Module):
    """A model of things without a rule: a recurrent layer, a function of the user's, a covariance, noise, a buffer given anew."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head, self.noise = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3), 0.1
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        x = Doubled.apply(x)[:, -1]
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = x - self.mean + self.noise * torch.randn_like(x)
        return self.head(x @ torch.cov(x.T))


@pytest.mark.parametrize("unfused", [(), ("lstm",)])
def test_what_has_no_rule_runs_all_the_same(unfused: tuple[str, ...]) -> None:
    models, batches = [Odd() for _ in SEEDS], [(torch.randn(5, 3, 4), torch.randint(0, 3, (5,))) for _ in range(3)]
    alone, fused = copy.deepcopy(models), fusion.fuse(models, seeds=SEEDS, unfused=unfused)
    train_fused(fused, fusion.optimizer("sgd", fused, lr=0.1), batches)
    for model, seed, found in zip(alone, SEEDS, fused.unfuse(), strict=True):
        train_alone(model, torch.optim.SGD(model.parameters(), 0.1), batches, seed)
        assert largest_difference(model, found) < 1e-12


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: torch.softmax(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "sum": lambda x: x.sum(),
    "mean of dims": lambda x: x.mean((0, 2), keepdim=True),
    "std": lambda x: x.std(),
    "std biased": lambda x: x.std(1, False),
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(1).values,
    "max of all": lambda x: x.max(),
    "argmax": lambda x: x.argmax(),
    "norm": lambda x: x.norm(),
    "norm of a dim": lambda x: x.norm(dim=1),
    "norm by torch": lambda x: torch.norm(x) + torch.norm(x, 1),
    "norm kept": lambda x: torch.norm(x, keepdim=True),
    "topk": lambda x: x.topk(2, 1)[0],
    "sort": lambda x: x.sort()[1],
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0, 1),
    "roll": lambda x: x.roll(1, 2),
    "glu": lambda x: F.glu(x),
    "normalize": lambda x: F.normalize(x),
    "view": lambda x: x.view(-1, 4),
    "reshape": lambda x: x.reshape((x.size(0), -1)),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(),
    "expand": lambda x: x.expand(2, -1, -1, -1),
    "repeat": lambda x: x.repeat(2, 1, 1, 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x: x.split(1)[1],
    "unbind": lambda x: x.unbind()[0],
    "stack": lambda x: torch.stack([x, torch.zeros(3, 4, 6)], -1),
    "index": lambda x: x[..., 1:3, None],
    "mask": lambda x: x[x[:, :, 0] == x[:, :, 0]],
    "gather": lambda x: x[:, torch.tensor([0, 2])],
    "where": lambda x: torch.where(x > 0, x, -x),
    "einsum": lambda x: torch.einsum("abc,abd->acd", x, x),
    "matmul": lambda x: x @ x.mT,
    "vector": lambda x: x @ x[0, 0],
    "rsub": lambda x: 1 - x,
    "pow": lambda x: 2**x,
    "T": lambda x: x[0].T @ x[1],
    "clamp": lambda x: x.clamp(min=0.1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "setitem": lambda x: _with_first(x),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "item": lambda x: x * (x.shape[0] + float(x.dim())),
    "loss": lambda x: F.mse_loss(x, torch.ones(3, 4, 6)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(3, 4, 6)),
    "ignored": lambda x: F.cross_entropy(x[0], torch.tensor([1, -100, 2, 3])),
    "smoothed": lambda x: F.cross_entropy(x[0], torch.tensor([1, 0, 2, 3]), label_smoothing=0.1),
    "weighted": lambda x: F.cross_entropy(x[0], torch.tensor([1, 0, 2, 3]), weight=torch.arange(6.0)),
    "scalar": lambda x: (x.sum() * x).mean(),
    "conv1d": lambda x: F.conv1d(x, torch.ones(2, 4, 3)),
    "avg pool": lambda x: F.avg_pool1d(x, 2),
    "diff": lambda x: x.diff(),
    "any": lambda x: (x > 0).any(),
    "prod": lambda x: x.prod(),
    "instance norm": lambda x: F.instance_norm(x),
    "rms norm": lambda x: F.rms_norm(x, (6,)),
    "tril": lambda x: x.tril(),
}


def _with_first(x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found[:, 1] = x[:, 0]
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_each_model_what_it_has_alone(name: str) -> None:
    raw = torch.randn(3, 3, 4, 6)
    found = CALLS[name](fusion.Fused(raw.clone()))
    for at in range(3):
        torch.testing.assert_close(found.raw[at], CALLS[name](raw[at].clone()), rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # an interpreter whose memory is overwritten as it is let go
def test_what_torch_takes_for_a_tensor_has_the_memory_of_one() -> None:
    """Its C++ asks `isinstance` and reads the memory: whether a base may be a number, it asks the tensor's number of dims."""
    script = (
        "import torch; from trainwright import fusion\n"
        "for x in [fusion.Fused(torch.ones(2, 3)) for _ in range(2000)]: torch.pow(x, 3.0)"
    )
    # With memory that is overwritten as it is let go, what lies behind an object is not zero by chance.
    environment = os.environ | {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "90"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_number_is_taken_of_what_all_models_share() -> None:
    assert torch.full((2,), fusion.Fused(torch.tensor([3.0, 3.0]))).tolist() == [3.0, 3.0]
    with pytest.raises(UserError, match=r"a value that all models share is needed.*3\.0, 4\.0"):
        torch.full((2,), fusion.Fused(torch.tensor([3.0, 4.0])))


def test_a_function_that_does_not_ask_for_the_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"aten\.detach.* was called by one that does not.*unfused="):
        torch.tensor(fusion.Fused(torch.ones(2, 3)))


VIEWS = [
    lambda x, d: x.transpose(d, -1), lambda x, d: x.flatten(d), lambda x, d: x.sum(d), lambda x, d: torch.relu(x) + 1,
    lambda x, d: x.unsqueeze(d), lambda x, d: torch.cat([x, x], d), lambda x, d: x.softmax(d), lambda x, d: x.select(d, 0),
    lambda x, d: x * x.mean(d, keepdim=True), lambda x, d: x.movedim(d, 0),
]  # fmt: skip


@given(steps=st.lists(st.tuples(st.integers(0, len(VIEWS) - 1), st.integers(0, 7)), max_size=5), num=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_chains_of_calls_are_each_models_own(steps: list[tuple[int, int]], num: int) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(num, 2, 3, 4, generator=generator, dtype=torch.float64)

    def run(x: Any) -> Any:
        for which, dim in steps:
            if x.dim() > 0:
                x = VIEWS[which](x, dim % x.dim())
        return x

    found = run(fusion.Fused(raw))
    for at in range(num):
        torch.testing.assert_close(found.raw[at], run(raw[at]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_autocast_computes_in_its_dtype(kind: str) -> None:
    models, (batch, *_) = make(kind, 2)
    for model in models:
        model.float().eval()
    batch = tuple(each.float() if each.is_floating_point() else each for each in batch)
    alone, fused = copy.deepcopy(models), fusion.fuse(models)
    with torch.autocast("cpu", torch.bfloat16):
        losses = fused.loss(batch, CRITERION)
        expected = torch.stack([CRITERION(model(batch[0]), batch[1]) for model in alone])
    losses.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in fused.parameters())


def test_padding_has_no_gradient_in_any_model() -> None:
    fused = fusion.fuse([nn.Embedding(4, 2, padding_idx=2) for _ in range(3)])
    fused(torch.tensor([0, 1, 2, 3])).sum().backward()
    assert fused.model.weight.grad is not None
    assert torch.equal(fused.model.weight.grad, torch.tensor([1.0, 1.0, 0.0, 1.0])[None, :, None].expand(3, 4, 2))


def test_a_zoo_model_fuses_as_it_is() -> None:
    from trainwright.models import zoo

    torch.set_default_dtype(torch.float32)
    built = [zoo.build("gpt2-tiny", device="cpu", seed=seed) for seed in range(2)]
    models, batch = [model.double().eval() for model, _ in built], built[0][1]
    fused = fusion.fuse(models)
    alone = [model(**batch) for model in models]
    torch.testing.assert_close(
        fused(**batch).logits, torch.stack([each.logits for each in alone]), rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(
        fused.loss(batch), torch.stack([each.loss for each in alone]), rtol=1e-6, atol=0
    )  # taken in fp32


def test_models_that_differ_are_refused_with_the_difference() -> None:
    for one, other, said in (
        (nn.Linear(3, 2), nn.Linear(4, 2), "in_features"),
        (nn.Linear(3, 2), nn.Linear(3, 2, bias=False), "bias"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU()), "the class of 0"),
        (nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, stride=2), "stride"),
        (nn.Linear(3, 2), nn.Linear(3, 2).float(), "weight"),
        (nn.Linear(3, 2), nn.Linear(3, 2).eval(), "training"),
    ):
        with pytest.raises(UserError, match=said):
            fusion.fuse([one, other])
    assert fusion.fusible([nn.Linear(3, 2), nn.Linear(4, 2), nn.Linear(3, 2)]) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda fused: fusion.optimizer("adamw", fused, lr=[0.1]), "value for each of 2"),
        (lambda fused: fusion.optimizer("adamw", fused, poem=1), "poem"),
        (lambda fused: fusion.optimizer("sophiah", fused), "gradients"),
        (lambda fused: fusion.optimizer("adamw", fused, groups=[{"params": ["nothing"]}]), "matches none"),
        (lambda fused: fusion.optimizer("adamw", fused, on_nan="cry"), "on_nan"),
        (lambda fused: fused.loss((torch.ones(4, 3),), lambda output: output), "one number a model"),
        (lambda fused: fused.stack([1]), "each of 2"),
        (lambda fused: fusion.fuse([]), "at least one"),
        (lambda fused: fusion.fuse([fused.model, fused.model]), "twice"),
        (lambda fused: fusion.fuse([nn.Linear(1, 1)], seeds=[1, 2]), "seed a model"),
        (lambda fused: fusion.fuse([nn.Linear(1, 1)], unfused=["no*"]), "there is none"),
    ],
)
def test_mistakes_are_said(call: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        call(fusion.fuse([nn.Linear(3, 2), nn.Linear(3, 2)]))


def test_what_would_part_the_models_is_refused() -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(self.weight.sum()) > 0 else x

    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = torch.zeros(4, 2)
            found[:, 0] = super().forward(x)[:, 0]
            return found

    for kind, said in ((Branches, "that all models share"), (Writes, "write the models' values into")):
        with pytest.raises(UserError, match=said):
            fusion.fuse([kind(3, 2), kind(3, 2)])(torch.ones(4, 3))


def test_a_fused_model_leaves_its_tensors_in_place_after_an_error() -> None:
    fused = fusion.fuse([Convolutional() for _ in range(2)])
    with pytest.raises(RuntimeError):
        fused(torch.ones(2, 5, 12, 12))
    assert all(isinstance(each, nn.Parameter) for each in fused.parameters())
    assert torch.autograd.Function.apply is not None
    assert len(list(itertools.chain(fused.buffers()))) == 3
    assert functools.reduce(lambda a, b: a * b, fused(torch.ones(2, 3, 12, 12)).shape) == 2 * 2 * 5


def test_the_example_runs() -> None:
    torch.set_default_dtype(torch.float32)
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sweep.py"))
    losses = script["main"](rates=(0.03, 0.0003), epochs=1)
    assert losses[0] < losses[1] < 2.4


def test_a_stopped_models_schedule_stands_still_and_stays_stopped_among_fewer() -> None:
    models = [nn.Linear(3, 1) for _ in range(3)]
    fused = fusion.fuse(models)
    optimizer = fusion.optimizer("sgd", fused, lr=1.0)
    rates = fusion.schedule(torch.optim.lr_scheduler.ExponentialLR, optimizer, gamma=0.5)
    optimizer.stop([1])
    for _ in range(2):
        fused.loss((torch.ones(4, 3), torch.zeros(4, 1)), nn.functional.mse_loss).sum().backward()
        optimizer.step()
        rates.step()
    assert optimizer.lrs == [0.25, 1.0, 0.25]
    kept = optimizer.keep([1, 2], fused.keep([1, 2]))
    assert kept.running == [False, True]


def test_a_frozen_model_is_not_fused_with_one_that_trains() -> None:
    frozen = nn.Linear(3, 1).requires_grad_(False)
    assert fusion.fusible([nn.Linear(3, 1), frozen, nn.Linear(3, 1)]) == [[0, 2], [1]]
