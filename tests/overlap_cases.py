"""What the tests of buckets run on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

import trainwright as tw
from trainwright.rank.buckets import _Buffer
from trainwright.runtime.module import full_gradients


class TwoOutputs(nn.Module):
    """The weights of `side` are trained parameters that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.side = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh()
        return {"loss": self.second(hidden).pow(2).mean(), "side": self.side(hidden)}


def _parallel(overlap: str) -> tuple[nn.Module, Any, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = TwoOutputs().double(), torch.randn(8, 6, dtype=torch.float64)
    plan = tw.plan(model, (x,), hardware="cpu:2", mesh=(2,), solver="ddp").model_copy(update={"overlap": overlap})
    torch.manual_seed(0)
    return tw.parallelize(TwoOutputs().double(), plan), plan.shard_batch((x,)), model, x


def unreached(overlap: str) -> float:
    module, part, model, x = _parallel(overlap)
    module(*part)["loss"].backward()
    model(x)["loss"].backward()
    return _largest_error(module, model)


def two_forwards() -> float:
    module, part, model, x = _parallel("ahead")
    losses = [module(*part)["loss"], module(*part)["loss"]]
    losses[0].backward()
    losses[1].backward()
    (2 * model(x)["loss"]).backward()
    return _largest_error(module, model)


def _largest_error(module: nn.Module, model: nn.Module) -> float:
    found = full_gradients(module)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(expected) == 4
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items())


def compiled(overlap: str) -> list[float]:
    """Return the largest error of the gradients of a compiled module, and how many graphs it was compiled to."""
    module, part, model, x = _parallel(overlap)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(module, backend=backend)
    for _ in range(2):
        module.zero_grad()
        step(*part)["loss"].backward()
    model(x)["loss"].backward()
    return [_largest_error(module, model), float(len(graphs))]


def compiled_whole() -> str:
    """Return what torch says when the whole module is to be one graph."""
    module, part, _, _ = _parallel("ahead")
    torch._dynamo.reset()
    try:
        torch.compile(module, backend="eager", fullgraph=True)(*part)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return "no error"


class Large(nn.Module):
    """Two large weights, and a parameter whose gradient is that of the activation that it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 1024), nn.Linear(1024, 1024, bias=False)
        self.shift = nn.Parameter(torch.ones(8, 1024))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh() + self.shift
        return {"loss": (self.second(hidden) + x).pow(2).mean()}


def in_place(solver: str) -> tuple[list[bool], float]:
    """Return, for each buffer of a step that took one gradient, whether it was that gradient itself; and the largest error."""
    torch.manual_seed(0)
    model, x = Large(), torch.randn(8, 1024)
    plan = tw.plan(model, (x,), hardware="cpu:2", mesh=(2,), solver=solver).model_copy(update={"overlap": "buckets"})
    torch.manual_seed(0)
    with mock.patch("trainwright.rank.travel.BUFFER_BYTES", 2**20):
        module = tw.parallelize(Large(), plan)
    found: list[bool] = []
    before = _Buffer.put

    def put(buffer: _Buffer, index: int, gradient: torch.Tensor) -> None:
        flat = buffer.flat
        before(buffer, index, gradient)
        if len(buffer.reduction.members) == 1:
            found.append(flat is not None and flat.data_ptr() == gradient.data_ptr())

    with mock.patch.object(_Buffer, "put", put):
        module(*plan.shard_batch((x,)))["loss"].backward()
    model(x)["loss"].backward()
    return found, _largest_error(module, model)


class Sum(nn.Module):
    """Both weights have the same gradient, and autograd hands over one tensor for it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x @ (self.one + self.other)).pow(2).mean()}


def clipped() -> list[float]:
    """Return the norms of the gradients of ours and of the model itself, after clipping."""
    model, x = Sum(), torch.ones(8, 6)
    plan = tw.plan(model, (x,), hardware="cpu:1")
    norms = []
    for module in (tw.parallelize(Sum(), plan), model):
        module(x)["loss"].backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        norms.append(sum(float(_local(p.grad).norm()) for p in module.parameters()))
    return norms


def _local(grad: Any) -> torch.Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad  # type: ignore[no-any-return]
