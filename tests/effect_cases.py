"""A model whose forward writes buffers in many ways, trained beside an eager copy; called by `tests/capture/test_effects.py`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

import trainwright as tw
from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan
from trainwright.capture.cached import cached_capture
from trainwright.program.layout import REPLICATE
from trainwright.program.program import Program, build_program
from trainwright.runtime.module import full_gradients

LR = 0.1


@library.custom_op("trainwright_tests::tally", mutates_args=("counts",))
def tally(x: Tensor, counts: Tensor) -> None:
    """Counts, channel by channel, the positive entries."""
    counts.add_((x > 0).sum((0, 2, 3)).to(counts.dtype))


@library.custom_op("trainwright_tests::smoothed", mutates_args=("mean",))
def smoothed(x: Tensor, mean: Tensor) -> Tensor:
    """The running mean after a step of it."""
    mean.mul_(0.5).add_(x.mean((0, 2, 3)), alpha=0.5)
    return mean.clone()


smoothed.register_fake(lambda x, mean: torch.empty_like(mean))


class Block(nn.Module):
    """A convolution and a batch norm, with statistics of its own in four more ways."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer)
        for name in ("in_place", "anew", "before", "counts", "own"):
            self.register_buffer(name, torch.linspace(0.5, 1.5, outer))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.conv(x)))
        x = x * self.before.clone()[:, None, None]  # saved for the backward, and written below
        mean = x.detach().mean((0, 2, 3))
        if self.training:
            self.before[1:].mul_(0.9)
            self.before.data[:1] = mean[:1]
            self.in_place.mul_(0.9).add_(mean, alpha=0.1)
            self.anew = 0.8 * self.anew + 0.2 * mean
            self.num_calls += 1
            tally(x.detach(), self.counts)
            smoothed(x.detach(), self.own)
        return F.silu(x - self.in_place[:, None, None])


class Net(nn.Module):
    """Two such blocks, an instance norm with statistics, a batch norm in evaluation mode, spectral norms of both kinds."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, width), Block(width, width)])
        self.instance = nn.InstanceNorm2d(width, affine=True, track_running_stats=True)
        self.frozen = nn.BatchNorm2d(width)
        self.frozen.running_mean += 0.3
        self.hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.head = nn.utils.spectral_norm(nn.Linear(width, 3))
        self.frozen.eval()

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            image = block(image)
        image = F.elu(self.frozen(self.instance(image)))
        logits = self.head(torch.tanh(self.hidden(image.mean((2, 3)))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def net() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its batch, in float64."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(4, 6, 5, 5, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    return Net().double(), {"image": image, "labels": torch.tensor([0, 2, 1, 1])}


def program() -> Program:
    return build_program(cached_capture(*net()))


def random_plan(seed: int, num_ranks: int) -> Plan:
    """A plan drawn from the whole space but for parameters, which are whole everywhere; nearly all is rerun that may be."""
    drawn = program()
    decisions = random_decisions(drawn, (num_ranks,), seed, recompute=0.9)
    decisions.params = dict.fromkeys(decisions.params, (REPLICATE,))
    decisions.shared = set()
    return plan_of(drawn, decisions)


def as_one_process(plan: str, num_steps: int = 2, accumulate: int = 1) -> dict[str, float]:
    """Train beside an eager copy; the largest differences, each of all steps. The copy sees the same batches."""
    parsed = Plan.parse(plan)
    model, batch = net()
    alone = copy.deepcopy(model)
    module = tw.parallelize(model, parsed, seed=0)
    worst = dict.fromkeys(("loss", "gradients", "buffers", "weights", "evaluation"), 0.0)
    for _ in range(num_steps):
        losses = []
        for current, fed in ((alone, batch), (module, parsed.shard_batch(batch))):
            current.zero_grad()
            loss = sum(current(**fed)["loss"] for _ in range(accumulate))
            loss.backward()
            losses.append(float(loss.detach()))
        _note(worst, "loss", torch.tensor(losses[0]), torch.tensor(losses[1]))
        found = full_gradients(module)
        for name, param in alone.named_parameters():
            _note(worst, "gradients", param.grad, found[name])
        buffers = dict(module.named_buffers())
        for name, buffer in alone.named_buffers():
            _note(worst, "buffers", buffer, buffers[name])
        for current in (alone, module):
            torch.optim.SGD(current.parameters(), LR).step()
    whole = tw.full_state_dict(module)
    for name, param in alone.named_parameters():
        _note(worst, "weights", param, whole[name])
    _evaluate(worst, alone, module, batch, parsed)
    return worst


def _evaluate(worst: dict[str, float], alone: nn.Module, module: nn.Module, batch: Any, plan: Plan) -> None:
    """Compare evaluation, and that it writes nothing."""
    alone.eval()
    module.eval()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        reference, found = alone(**batch), module(**plan.shard_batch(batch))
    logits = found["logits"]
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    _note(worst, "evaluation", reference["logits"], whole)
    _note(worst, "evaluation", reference["loss"], found["loss"])
    for name, buffer in module.named_buffers():
        _note(worst, "evaluation", before[name], buffer)


def _note(worst: dict[str, float], what: str, one: Any, other: Any) -> None:
    difference = float((one.detach().double() - other.detach().double()).abs().max()) if one.numel() else 0.0
    worst[what] = max(worst[what], difference)
