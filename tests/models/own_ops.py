"""Ops that no table lists, and models of them: builders for the command line's MODEL. Importing registers the ops."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, library, nn

ROWS, WIDTH, INNER, OUT = 8, 12, 16, 6


@library.custom_op("tests_own::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    """Elementwise."""
    return torch.tanh(x) * y


gate.register_fake(lambda x, y: torch.empty_like(x))


def _gate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    t = torch.tanh(x)
    return grad * y * (1 - t * t), grad * t


gate.register_autograd(_gate_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@library.custom_op("tests_own::rows", mutates_args=())
def rows(x: Tensor, dim: int) -> Tensor:
    """A softmax along `dim`."""
    return torch.softmax(x, dim)


rows.register_fake(lambda x, dim: torch.empty_like(x))


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (out,) = ctx.saved_tensors
    return out * (grad - (grad * out).sum(ctx.dim, keepdim=True)), None


def _rows_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dim = inputs[1]


rows.register_autograd(_rows_backward, setup_context=_rows_context)


@library.custom_op("tests_own::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """`b i, i o -> b o`."""
    return x @ weight


product.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]))
product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@library.custom_op("tests_own::ramp", mutates_args=())
def ramp(x: Tensor) -> Tensor:
    """Adds each column's number: no shard of the columns knows its own."""
    return x + torch.arange(x.shape[1], dtype=x.dtype)


ramp.register_fake(torch.empty_like)
ramp.register_autograd(lambda ctx, grad: grad)


@library.custom_op("tests_own::pairs", mutates_args=())
def pairs(x: Tensor) -> Tensor:
    """Sums neighbours: takes an even number of columns, and nothing smaller than eight of them."""
    if x.shape[1] % 2 or x.shape[1] < 8:
        raise ValueError("an even number of columns is needed, 8 or more")
    return x[:, ::2] + x[:, 1::2]


pairs.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[1] // 2))
pairs.register_autograd(lambda ctx, grad: grad.repeat_interleave(2, 1))


@library.custom_op("tests_own::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws random numbers."""
    return x * torch.rand_like(x)


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, grad: grad)


@library.custom_op("tests_own::add_in_place", mutates_args=["x"])
def add_in_place(x: Tensor) -> None:
    """Writes its input."""
    x.add_(1)


class Net(nn.Module):
    """All of the ops that have a rule to be found, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, INNER)
        self.weight = nn.Parameter(torch.randn(INNER, OUT) / 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = self.first(x)
        mixed = ramp(rows(gate(inner, inner * 0.5), 1)) + rows(inner, 0)
        return (product(mixed, self.weight) - y).square().mean()


def net(**_: Any) -> Any:
    torch.manual_seed(0)
    return Net(), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, OUT))


@library.custom_op("tests_own::unchecked", mutates_args=())
def unchecked(x: Tensor, scale: Tensor) -> Tensor:
    """Scales each row; ends the process where there are not as many scales as rows, as a kernel that writes past them may."""
    if len(x) != len(scale):
        os.abort()
    return x * scale[:, None]


unchecked.register_fake(lambda x, scale: torch.empty_like(x))
