"""A model with ops of its user's own, on real ranks, called by `tests/program/test_user_ops.py`; the process group is initialised.

The ops and their rules are defined as a user would: where the model is, so that every process that imports it knows them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library, nn

import trainwright as tw
from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan
from trainwright.capture.cached import cached_capture
from trainwright.program.program import Program, build_program
from trainwright.runtime import verify as compare


@library.custom_op("trainwright_tests::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    """3 x Wᵀ"""
    return 3 * x @ weight.t()


project.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return 3 * grad @ weight, 3 * grad.flatten(0, -2).t() @ x.flatten(0, -2)


project.register_autograd(_project_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
tw.register_op(project, "b* i, o i -> b* o", reduced="i")


@library.custom_op("trainwright_tests::rounded", mutates_args=())
def rounded(x: Tensor, steps: int) -> Tensor:
    """x to the nearest of `steps` to a unit; its gradient passes as if there were no rounding, doubled."""
    return torch.round(x * steps) / steps


rounded.register_fake(lambda x, steps: torch.empty_like(x))
rounded.register_autograd(lambda ctx, grad: (2 * grad, None))
tw.register_op("trainwright_tests::rounded", "d* -> d*", kind="elementwise")


@library.custom_op("trainwright_tests::linear", mutates_args=())
def linear(x: Tensor) -> Tensor:
    """x / Σ x² along the last dim: nothing that may be split there, and nothing like torch's own op of that name."""
    return x / (1 + x.square().sum(-1, keepdim=True))


linear.register_fake(lambda x: torch.empty_like(x))


def _linear_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    total = 1 + x.square().sum(-1, keepdim=True)
    return grad / total - 2 * x * (grad * x).sum(-1, keepdim=True) / total.square()


linear.register_autograd(_linear_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
tw.register_op(torch.ops.trainwright_tests.linear, "b* c -> b* c", whole="c")


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2 * width, width) / width)
        self.down = nn.Parameter(torch.randn(width, 2 * width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x + project(rounded(project(x, self.up), 64), self.down))


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(3)
    return Model().double(), (torch.randn(4, 6, 16, dtype=torch.float64),)


def program() -> Program:
    return build_program(cached_capture(*build()))


def random_plan(mesh: list[int], seed: int) -> dict[str, Any]:
    """Verify a plan drawn from the whole space of a model of own ops."""
    found = program()
    return compare(build, plan_of(found, random_decisions(found, tuple(mesh), seed, 0.5), {})).model_dump()


def run(plan: str) -> dict[str, Any]:
    """Verify a plan; and its gradients beside those of the model itself, whose backwards are the user's."""
    from trainwright.runtime.module import full_gradients

    parsed = Plan.parse(plan)
    report = compare(build, parsed, make_optimizer=lambda params: torch.optim.AdamW(params, foreach=False))
    model, batch = build()
    model(*batch).backward()
    own, batch = build()
    module = tw.parallelize(own, parsed, seed=0)
    module(*parsed.shard_batch(batch)).backward()
    found = full_gradients(module)
    worst = max(float((found[key] - param.grad).abs().max()) for key, param in model.named_parameters())
    return {**report.model_dump(), "worst": worst}
