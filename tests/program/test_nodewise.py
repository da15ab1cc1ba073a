"""Gradients from the nodes of autograd's graph equal those of its engine, which a fork cannot use where torch has GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.ops import Call, TensorSpec
from trainwright.program import discover, nodewise


class Two(torch.autograd.Function):
    """Two results, a number among the arguments, and a tensor that needs no gradient."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, mask: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        ctx.save_for_backward(x, mask)
        return factor * x * mask, x.sum() + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor | None, ...]:
        x, mask = ctx.saved_tensors
        return None, ctx.factor * first * mask + second.sum().expand_as(x), None, second


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one result": lambda x, y: torch.cumsum(x @ y, 1),
    "read twice": lambda x, y: (x * x.tanh()).sum(0),
    "two results": lambda x, y: torch.var_mean(x, 1),
    "one of two results": lambda x, y: torch.linalg.qr(x.T @ x)[1],
    "a user's function": lambda x, y: Two.apply(2.0, x, torch.ones(4, 5).tril(), y),
    "one result of a user's function": lambda x, y: Two.apply(2.0, x, torch.ones(4, 5), y)[1],
    "expanded": lambda x, y: x[:, :1].expand(4, 3) + y.sum(),
    "another type": lambda x, y: x.float() * y.T.double()[:4, :5].float(),
    "views": lambda x, y: F.pad(x.view(2, 10).t(), (1, 1))[1:, 1:].contiguous(),
    "nothing of the second": lambda x, y: torch.logsumexp(x, 0),
    "the input itself": lambda x, y: (x, x * 2),
    "normalised": lambda x, y: F.layer_norm(x, (5,), y[0, :5]),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_engine(name: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)]
    for value in inputs:
        value.requires_grad_()
    made = CASES[name](*inputs)
    outputs = [out for out in (made if isinstance(made, tuple) else (made,)) if out.requires_grad]
    given = [torch.randn_like(out) for out in outputs]
    found = nodewise.gradients(outputs, inputs, given)
    expected = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_rules_are_found_where_forks_cannot_use_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every process whose torch was built for GPUs, once it has run a backward."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    monkeypatch.setattr(torch.autograd, "backward", refuse)
    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", refuse)
    spec = TensorSpec((9, 10), torch.float32, True)
    call = Call("renorm", (spec, 2.0, 0, 1.0), {}, (TensorSpec((9, 10), torch.float32),))
    found = discover.discovered(torch.ops.aten.renorm.default, call, [True])
    assert found is not None
    assert found.discovered
